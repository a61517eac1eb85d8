"""The dense part of a captured step, compiled: many small kernels of each layer become few.

Each layer is a graph of its own, not the whole step, so that layers of a kind share one and a model of 48 layers is
compiled about as fast as one of two. For that, nothing that a layer has for itself may be a constant of its graph:
parameters and the handle of its experts are tensors, which dynamo takes as inputs, and it is shown a cache of this one
layer, in which the layer's index means nothing. Where layers differ in more, dynamo's guards see it, and they get
another graph.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import textwrap
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from transformers.cache_utils import Cache

from freetoken import settings
from freetoken.errors import FreeTokenError
from freetoken.integration.plan import find_experts
from freetoken.integration.topk import OwnTopK, exchange_topk

logger = logging.getLogger(__name__)

BACKEND = "inductor"
"""Of torch.compile. Code of inductor is invisible to graphs of the simulated device."""
OPTIONS: dict[str, Any] = {"triton.cudagraphs": False, "coordinate_descent_tuning": True}
"""Of inductor: its code is captured here, among what the experts put into the graph; and with tuning it multiplies a
matrix with a single vector by a kernel of its own. A step without experts, gpt-oss-120b cut to 12 layers on an H200:
2.3 ms as it is, 1.24 to 1.37 compiled, 1.01 compiled with tuning."""
KINDS = 8
"""Graphs of one function at most: layers of a model that differ more are not compiled."""
_BESIDE = ("Norm", "RotaryEmbedding")
"""How classes of modules end that stand beside the layers and are compiled too."""

_REASON = 200
"""Characters of the reason why a model is not compiled; errors of inductor begin with a cause and end with a graph."""

_models: weakref.WeakKeyDictionary[Any, CompiledLayers] = weakref.WeakKeyDictionary()


def compiled_layers(model: Any, cache_name: str) -> CompiledLayers | None:
    """The model's, None unless FREETOKEN_COMPILE is on. cache_name: of the argument that is the cache."""
    if settings.COMPILE.read() == "off":
        return None
    if model not in _models:
        _models[model] = CompiledLayers(cache_name)
    return _models[model]


class CompiledLayers:
    """A model's layers, and norm and rotary embedding beside them, as compiled functions for fixed shapes.

    cache_name: of the argument that is the cache. A model that cannot be compiled runs as it is, with one line that
    says why.
    """

    def __init__(self, cache_name: str) -> None:
        self._cache_name = cache_name
        self._functions: dict[Hashable, Callable[..., Any]] = {}
        self._graphs = 0
        self._lock = threading.Lock()  # modules have one forward, whoever compiles
        self.why_not = ""
        """Why this model is not compiled, once that was found."""

    @contextlib.contextmanager
    def used(self, model: Any, shapes: Hashable) -> Iterator[None]:
        """Inside, layers that this thread calls run compiled; what is called first is compiled first.

        shapes: what stands for those of all tensors. Nothing is compiled while a stream is captured.
        """
        with self._lock:
            modules = [] if self.why_not else self._modules(model)
            thread, graphs, start = threading.get_ident(), self._graphs, time.perf_counter()
            for part, number, module in modules:
                function = self._function((part, shapes))
                module.forward = functools.partial(self._run, thread, function, module, number)
            try:
                limit = torch._dynamo.config.patch(recompile_limit=KINDS)
                with limit, contextlib.nullcontext() if modules else OwnTopK():
                    yield
            finally:
                for _, _, module in modules:
                    del module.forward
            if (graphs := self._graphs - graphs) and not self.why_not:
                seconds = time.perf_counter() - start
                logger.info("%d modules compiled as %d graphs in %.1f s", len(modules), graphs, seconds)

    def _modules(self, model: Any) -> list[tuple[str, int, torch.nn.Module]]:
        """What is compiled, with the name of the part that it belongs to, and its number there."""
        stack = _stack(model)
        if stack is None:
            self._give_up(f"{type(model).__name__} has no list of layers with experts")
            return []
        parent = model.get_submodule(stack.rpartition(".")[0])
        beside = [(name, m) for name, m in parent.named_children() if type(m).__name__.endswith(_BESIDE)]
        found = [(stack, number, layer) for number, layer in enumerate(model.get_submodule(stack))]
        for _, number, layer in found:
            if any(getattr(module, "layer_idx", number) != number for module in layer.modules()):
                self._give_up(f"layer {number} has another number in the cache")
        found += [(name, 0, module) for name, module in beside]
        if any("forward" in vars(module) for _, _, module in found):
            self._give_up("a layer has a forward of its own")
        return [] if self.why_not else found

    def _function(self, key: Hashable) -> Callable[..., Any]:
        if key not in self._functions:  # with code of its own: there dynamo keeps graphs, and counts them
            own = types.FunctionType(_call.__code__.replace(), globals())
            self._functions[key] = torch.compile(own, backend=self._compile, fullgraph=True, dynamic=False)
        return self._functions[key]

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        if _is_capturing():
            raise RuntimeError("the capture differs from the run before it")
        self._graphs += 1
        # of inductor, about a choice of its own: where warnings are errors, nothing would be compiled for it
        warnings.filterwarnings("ignore", r"\s*Online softmax is disabled on the fly", UserWarning)
        _add_biases_apart(graph)
        exchange_topk(graph)
        more = {"config_patches": OPTIONS} if BACKEND == "inductor" else {}
        return lookup_backend(BACKEND)(graph, inputs, **more)

    def _run(
        self, thread: int, function: Callable[..., Any], module: torch.nn.Module, number: int, *args: Any, **kwargs: Any
    ) -> Any:
        if threading.get_ident() != thread:
            return _call(module, args, kwargs)
        if not self.why_not:
            cache = kwargs.get(self._cache_name)
            shown = {} if cache is None else {self._cache_name: _OneLayer(cache, number)}
            try:
                return function(module, args, kwargs | shown)
            except (FreeTokenError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                not_begun = isinstance(error, TorchDynamoException | FailOnRecompileLimitHit)
                if _is_capturing() and not not_begun:
                    raise  # what it has put into the graph is there
                cause = getattr(error, "inner_exception", error)
                self._give_up(f"{type(cause).__name__}: {textwrap.shorten(str(cause), _REASON, placeholder=' ...')}")
        with OwnTopK():
            return _call(module, args, kwargs)

    def _give_up(self, why: str) -> None:
        if not self.why_not:
            self.why_not = why
            logger.warning("steps are captured without being compiled: %s", why)


class _OneLayer(Cache):  # type: ignore[misc]
    """A cache as its layer of this number sees it, which is the same for all of them."""

    def __init__(self, cache: Cache, number: int) -> None:
        super().__init__(layers=cache.layers[number : number + 1])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        return self.layers[0].update(key_states, value_states, *args, **kwargs)


def _call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _add_biases_apart(graph: torch.fx.GraphModule) -> None:
    """Linear modules with a bias as a product and a sum: only products alone are multiplied with a vector as above."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.nn.functional.linear):
        x, weight, bias = (
            *node.args,
            *(node.kwargs[name] for name in ("weight", "bias") if name in node.kwargs),
            None,
        )[:3]
        if bias is None:
            continue
        with graph.graph.inserting_before(node):
            product = graph.graph.call_function(torch.nn.functional.linear, (x, weight))
            product.meta.update(node.meta)
            total = graph.graph.call_function(torch.add, (product, bias))
            total.meta.update(node.meta)
        node.replace_all_uses_with(total)
        graph.graph.erase_node(node)
    graph.recompile()


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _stack(model: Any) -> str | None:
    """The name of the list of layers in which there are experts."""
    for name in find_experts(model):
        parts = name.split(".")
        for end in range(1, len(parts)):
            if isinstance(model.get_submodule(".".join(parts[:end])), torch.nn.ModuleList):
                return ".".join(parts[:end])
    return None
