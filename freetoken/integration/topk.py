"""Our top-k kernel in the place of torch.topk, where a step is captured: routers of transformers call that.

A replay has what the capture launched, so nothing of this costs a replay anything. Everywhere else torch's is used.
"""

from __future__ import annotations

import importlib.util
import operator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_FUNCTIONS = (torch.topk, torch.Tensor.topk)


class OwnTopK(TorchFunctionMode):
    """Inside, calls of torch.topk by this thread are calls of our kernel where it does that. Not for torch.compile."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = _taken(*args, **kwargs) if func in _FUNCTIONS else None
        if found is None:
            return func(*args, **kwargs)
        return torch.return_types.topk(torch.ops.freetoken.topk(*found))


def exchange_topk(graph: torch.fx.GraphModule) -> None:
    """The same for a graph of dynamo's. Nodes that anything but their two results is taken of are left alone."""
    nodes = graph.graph.find_nodes(op="call_function", target=torch.topk)
    for node in [*nodes, *graph.graph.find_nodes(op="call_method", target="topk")]:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda other: other.meta.get("example_value"))
        if _taken(*args, **kwargs) is None or any(user.target is not operator.getitem for user in node.users):
            continue
        given = _arguments(*node.args, **node.kwargs)
        with graph.graph.inserting_before(node):
            own = graph.graph.call_function(torch.ops.freetoken.topk.default, (given["input"], given["k"]))
            own.meta.update(node.meta)
        node.replace_all_uses_with(own)
        graph.graph.erase_node(node)
    graph.recompile()


def _arguments(
    input: Any, k: Any, dim: Any = -1, largest: Any = True, sorted: Any = True, *, out: Any = None
) -> dict[str, Any]:
    """By their names, as torch.topk has them."""
    return {"input": input, "k": k, "dim": dim, "largest": largest, "out": out}


def _taken(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, int] | None:
    """What our kernel is given for a call of torch.topk, of a fake tensor too; None where it is torch's."""
    if importlib.util.find_spec("triton") is None:
        return None
    from freetoken.gpu import topk  # imports triton

    try:
        given = _arguments(*args, **kwargs)
    except TypeError:  # NumPy's names of arguments, which torch takes, or none that it takes
        return None
    x, k = given["input"], given["k"]
    if type(k) is not int or given["out"] is not None or not given["largest"] or not isinstance(x, torch.Tensor):
        return None
    is_last = x.dim() > 0 and given["dim"] in (-1, x.dim() - 1)
    if not is_last or x.requires_grad or not topk.is_known(x, k) or not topk.runs_on(x.device):
        return None
    return x, k
