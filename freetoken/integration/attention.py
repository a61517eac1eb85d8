"""Attention of steps on a fixed cache by a kernel of ours (`freetoken.gpu.attention`), in place of transformers' own.

Modules of transformers look their attention up when they are called, by the name that stands in their config, and take
what was registered under it. So functions are registered under names of ours, and while a step runs its model's config
has one of them, which says what the user's is: no module is changed, no function of transformers' is replaced, and
nothing is left behind. Whoever calls the model meanwhile from another thread, and a call that asks for what the kernel
does not do, gets transformers' own function.

Only transformers' own functions and modules are exchanged: what somebody else's do, no try can tell. What a family's
own eager attention computes is found by trying it, as activations are.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from freetoken import settings

logger = logging.getLogger(__name__)

ATTENTIONS = ("eager", "sdpa")
"""Implementations of attention that take masks to be added and wait for nothing."""
INTERPRETED = False
"""Whether Triton's interpreter is good enough: it takes hundredths of a second for each layer."""
_PREFIX = "freetoken_"
_GROUPS = "num_key_value_groups"
"""What modules have that look attention up, and whose functions are tried."""
_IDLE = {
    "dropout",
    "is_causal",
    "output_router_logits",
    "position_ids",
    "s_aux",
    "scaling",
    "sliding_window",
    "softcap",
    "use_cache",
}
"""What a call may give. Windows are in the mask, sinks are the module's."""
_LOOK_UP = r"get_interface\(\s*self\.config\._attn_implementation,"
_SOFTCAP = 1e4
"""At most; a score divided by more, float32 could not tell from 0."""
_BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}
"""Of the norm, by which two ways to attend may differ; one without a sink or with another scale is far beyond."""

_models: weakref.WeakKeyDictionary[Any, StepAttention] = weakref.WeakKeyDictionary()
_stepping = threading.local()


class _Function(NamedTuple):
    """One of transformers'. capped: whether it knows softcap."""

    call: Callable[..., Any]
    capped: bool


_functions: dict[tuple[str, type], _Function] = {}
"""By implementation and class of a module."""


@torch.library.custom_op("freetoken::attention", mutates_args=())
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor | None,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    """See `freetoken.gpu.attention.attend`."""
    from freetoken.gpu.attention import attend

    return attend(query, key, value, mask, sinks, scaling, softcap)


@attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> torch.Tensor:
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[-1])


def implementation(config: Any) -> Any:
    """What the user has a text config attend with, also while a step runs."""
    name = config._attn_implementation
    return name.removeprefix(_PREFIX) if isinstance(name, str) else name


def step_attention(model: Any) -> StepAttention | None:
    """The model's, for its attention, type and device as they are now; None where steps have transformers' own.

    Tries what was not tried before, so it is not for a stream that is captured.
    """
    if settings.ATTENTION.read() == "transformers" or not _runs_on(model.device):
        return None
    name = implementation(model.config.get_text_config())
    if why := _why_not(model, name):
        logger.info("steps attend by transformers' own %s: %s", name, why)
        return None
    found = _models.setdefault(model, StepAttention())
    found.names.add(name)
    return found


class StepAttention:
    """The switch of a model's attention. names: the implementations in place of which the kernel may come."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._lock = threading.RLock()  # a model has one config, whoever steps

    @contextlib.contextmanager
    def used(self, model: Any) -> Iterator[None]:
        """Inside, calls of this thread attend by the kernel."""
        config = model.config.get_text_config()
        with self._lock:
            name = implementation(config)
            if name not in self.names:  # it was chosen later
                yield
                return
            config._attn_implementation = ours = _PREFIX + name
            _stepping.is_on = True
            try:
                yield
            finally:
                _stepping.is_on = False
                if config._attn_implementation == ours:  # else it was given another meanwhile
                    config._attn_implementation = name


def _runs_on(device: torch.device) -> bool:
    """Whether the kernel does."""
    try:
        import triton
    except ImportError:
        return False
    return device.type == "cuda" or (INTERPRETED and bool(triton.knobs.runtime.interpret))


def _why_not(model: Any, name: Any) -> str:
    """Why the kernel does not what an implementation does in this model; nothing if it does."""
    config = model.config.get_text_config()
    kinds = {
        (type(module), getattr(module, "sinks", None) is not None)
        for module in model.modules()
        if getattr(module, "config", None) is config and hasattr(module, _GROUPS)
    }
    if name not in ATTENTIONS or not kinds:
        return f"{type(model).__name__} has no modules that look it up"
    if any("forward" in vars(module) for module in model.modules() if type(module) in {kind for kind, _ in kinds}):
        return "one that looks it up has a forward of its own"
    for kind, sinks in kinds:
        if not _looks_up_only(kind):
            return f"{kind.__name__} is not transformers' own, or depends on what it is called"
        _functions[name, kind] = found = _find(name, kind)
        if found.call is not None and not _is_of_transformers(found.call):
            return f"that of {kind.__name__} is not transformers' own"
        if why := _try(found.call, sinks, model.dtype, model.device):
            return f"that of {kind.__name__} {why}"
    return ""


def _find(name: str, kind: type) -> _Function:
    """What a module of this class looks up."""
    own = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
    call = ALL_ATTENTION_FUNCTIONS.get_interface(name, own)
    return _Function(call, call is not None and "softcap" in inspect.signature(call).parameters)


def _is_of_transformers(call: Callable[..., Any]) -> bool:
    """Where a function was written, whatever it says of itself."""
    return str(getattr(call, "__globals__", {}).get("__name__", "")).startswith("transformers.")


def _looks_up_only(kind: type) -> bool:
    """Whether a class is of transformers' models and uses the name of an attention for nothing but to look it up."""
    if not kind.__module__.startswith("transformers.models."):
        return False
    try:
        source = "".join(inspect.getsource(of) for of in kind.__mro__ if of.__module__.startswith("transformers."))
    except (OSError, TypeError):
        return False
    return source.count("_attn_implementation") == len(re.findall(_LOOK_UP, source))


@functools.cache
def _try(call: Callable[..., Any] | None, sinks: bool, dtype: torch.dtype, device: torch.device) -> str:
    """How a function differs from the kernel, with few columns, beside which a sink, if there is one, weighs much."""
    if call is None:
        return "is not found"
    if dtype not in _BOUND:
        return f"has values of {dtype}"
    random = torch.Generator().manual_seed(0)
    query, key, value, sink = (
        torch.randn(*shape, generator=random).to(device, dtype)
        for shape in ((2, 4, 1, 64), (2, 2, 24, 64), (2, 2, 24, 64), (4,))
    )
    columns = torch.arange(24, device=device)
    hidden = (columns % 8 != torch.tensor([[3], [5]], device=device))[:, None, None]
    mask = torch.zeros(2, 1, 1, 24, dtype=dtype, device=device).masked_fill(hidden, torch.finfo(dtype).min)
    module = SimpleNamespace(num_key_value_groups=2, head_dim=64, is_causal=True, training=False)
    module.sinks = sink if sinks else None
    more = {"softcap": 2.0} if "softcap" in inspect.signature(call).parameters else {}
    given = {"scaling": 0.25, "dropout": 0.0, "s_aux": module.sinks, "sliding_window": None, **more}
    try:
        theirs = call(module, query, key, value, mask, **given)[0].double()
    except Exception as error:  # noqa: BLE001 - a model's code may raise anything
        return f"asks for more: {type(error).__name__}: {error}"
    try:
        ours = attention(query, key, value, mask, module.sinks, 0.25, more.get("softcap", 0.0)).double()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - nor need a compiler succeed
        return f"has a kernel that fails: {type(error).__name__}: {error}"
    apart = float((ours - theirs).norm() / theirs.norm())
    bound = _BOUND[dtype]
    return "" if apart <= bound else f"computes something else: {apart:.2g} apart, at most {bound} is rounding"


def _attend(
    name: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **given: Any,
) -> Any:
    """What modules call while a step runs; see transformers' `AttentionInterface`."""
    # Only steps are compiled under this name. What is read here is guarded there: no table, which may grow.
    is_step = torch.compiler.is_compiling() or getattr(_stepping, "is_on", False)
    sinks, softcap = getattr(module, "sinks", None), given.get("softcap")
    fits = is_step and hasattr(module, _GROUPS) and _is_for_kernel(query, key, value, attention_mask, sinks, given)
    if fits and (softcap is None or _of(name, type(module)).capped):
        how = given["scaling"], softcap or 0.0
        return torch.ops.freetoken.attention(query, key, value, attention_mask, sinks, *how), None
    return _of(name, type(module)).call(module, query, key, value, attention_mask, **given)


def _of(name: str, kind: type) -> _Function:
    return _functions.get((name, kind)) or _find(name, kind)


def _is_for_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    given: dict[str, Any],
) -> bool:
    """Whether the kernel does what a call asks for, but for softcap."""
    from freetoken.gpu.attention import why_not_attend

    if query.shape[2] != 1 or why_not_attend(query, key, value):
        return False
    if mask is None or not mask.is_floating_point() or mask.shape != (query.shape[0], 1, 1, key.shape[2]):
        return False
    if sinks is not None and sinks.shape != (query.shape[1],):
        return False
    if given.get("dropout") or not isinstance(given.get("scaling"), float):
        return False
    if (given.get("softcap") or 0) > _SOFTCAP or (sinks is None and given.get("s_aux") is not None):
        return False
    return all(name in _IDLE or value is None or value is False for name, value in given.items())


for _name in ATTENTIONS:
    AttentionInterface.register(_PREFIX + _name, functools.partial(_attend, _name))
    AttentionMaskInterface.register(_PREFIX + _name, ALL_MASK_ATTENTION_FUNCTIONS[_name])
