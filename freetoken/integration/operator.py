"""The torch operator `freetoken::experts` and the experts function that transformers calls.

One operator with a fake kernel works eagerly and under torch.compile(fullgraph=True). Layers are found by a number,
because an operator takes no objects; the table holds them weakly, so a deleted model frees its banks. The number is a
tensor: as an int it would be a constant of compiled code, and each layer would need code of its own. A model used in
a forked child is refused before its first layer: torch's own OpenMP team did not survive the fork and would hang.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import weakref
from typing import Any

import torch

from freetoken.errors import FreeTokenError
from freetoken.executor import BoundLayer, forked_error
from freetoken.offload.layer import DeviceLayer

IMPLEMENTATION = "freetoken"
"""Name under which the experts function is registered with transformers."""

_HANDLE = "_freetoken_handle"
_LAYER = "_freetoken_layer"
AnyLayer = BoundLayer | DeviceLayer
"""What computes a module's experts."""
_layers: weakref.WeakValueDictionary[int, AnyLayer] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_table_lock = threading.Lock()
_forks = 0


@torch.library.custom_op("freetoken::experts", mutates_args=())
def experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    """(B, H): the weighted sum of routed experts of the layer with this handle, () int64; see `Executor.run`."""
    number = int(handle)
    layer = _layers.get(number)
    if layer is None:
        raise FreeTokenError(f"expert layer {number} is gone: its model was deleted or never finished loading")
    return layer.run(x, ids, weights)


@experts.register_fake
def _(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def experts_forward(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What transformers calls instead of an experts module's own forward. Shapes: (B, H), (B, K), (B, K)."""
    handle = getattr(module, _HANDLE, None)
    if handle is None:
        raise FreeTokenError(
            f"{type(module).__name__} has no expert bank: only models from freetoken.load or freetoken.attach may use "
            f"experts_implementation={IMPLEMENTATION!r}; if attach was interrupted, call it again to finish"
        )
    result: torch.Tensor = torch.ops.freetoken.experts(hidden_states, top_k_index, top_k_weights, handle)
    return result


def attach_layer(module: torch.nn.Module, layer: AnyLayer) -> None:
    """Give a module its layer, ready to run."""
    keep_layer(module, layer)
    with _table_lock:
        number = next(_numbers)
        _layers[number] = layer
    object.__setattr__(module, _HANDLE, torch.tensor(number, device="cpu"))


def keep_layer(module: torch.nn.Module, layer: AnyLayer) -> None:
    """Give a module its layer, which refuses to run before `attach_layer`.

    Kept outside torch's state, so that .to(), state_dict and estimates never see it.
    """
    object.__setattr__(module, _LAYER, layer)


def is_ready(module: torch.nn.Module) -> bool:
    """Whether a module's layer runs."""
    return hasattr(module, _HANDLE)


def layer_of(module: torch.nn.Module) -> AnyLayer | None:
    """The layer a module was given, or None."""
    layer: Any = getattr(module, _LAYER, None)
    return layer if isinstance(layer, AnyLayer) else None


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def check_fork(forks: int, module: torch.nn.Module, args: object) -> None:
    """A hook before a model's forward: refuses it where the process has forked since."""
    if forks != _forks:  # a plain number: os.getpid could not be traced by torch.compile
        raise forked_error()


def refuse_after_fork(model: torch.nn.Module) -> None:
    """Make the model raise `UnsupportedError` when it is called in a child of this process."""
    for entry in {model, getattr(model, "base_model", model)}:
        entry.register_forward_pre_hook(functools.partial(check_fork, _forks))
