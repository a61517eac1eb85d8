"""`model.generate` for a model on a device: transformers' own, but that the loop is `decoding.py`'s where it can be.

transformers prepares everything as ever, down to processors and criteria. What the loop does not know is left to
transformers' own, with one line that says why, and gives the same tokens.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules import module
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria

from freetoken import settings
from freetoken.errors import FreeTokenError
from freetoken.integration.decoding import Decoder, UnsuitedError
from freetoken.integration.fixed_cache import why_not_fixed
from freetoken.integration.operator import check_fork
from freetoken.offload.experts import DeviceExperts

logger = logging.getLogger(__name__)

_NOT_OURS = ("assistant_model", "cache", "custom_generate", "inputs_embeds", "past_key_values", "synced_gpus")
"""Arguments of `generate` with which it is transformers' own."""


def install(model: Any, experts: DeviceExperts) -> None:
    """Let `model.generate` replay steps, unless FREETOKEN_GRAPH is off. experts: the model's."""
    for setting in (settings.ATTENTION, settings.COMPILE):
        setting.read()  # what is wrong is said when the model is loaded, not in its first text
    if settings.GRAPH.read() != "off" and hasattr(type(model), "generate"):
        model.generate = Generate(model, experts)


class Generate:
    """What `model.generate` is for a model on a device; calls from several threads queue."""

    def __init__(self, model: Any, experts: DeviceExperts) -> None:
        self._model = weakref.ref(model)  # the model holds this
        self._plain = type(model).generate
        self.__doc__ = self._plain.__doc__
        self.__signature__ = inspect.signature(self._plain.__get__(model))
        self._decoder = Decoder(experts)
        self._said: set[str] = set()
        self._pid = os.getpid()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See transformers' `GenerationMixin.generate`."""
        model = self._model()
        if model is None:
            raise FreeTokenError("the model whose generate this is was deleted: keep a reference to it")
        bound = self.__signature__.bind_partial(*args, **kwargs).arguments
        given = bound | bound.pop("kwargs", {})
        given.setdefault("disable_compile", True)  # a compiled step would be captured by torch, which knows no duties
        if os.getpid() != self._pid:  # a thread that did not come along may have held a lock
            return self._plain(model, **given)
        why, level = self._decoder.why_not or why_not_fixed(model) or "", logging.WARNING
        if not why:
            why, level = _why_not_ours(model, given), logging.INFO
        if not why:
            try:
                return self._replay(model, given)
            except UnsuitedError as unsuited:
                why, level = str(unsuited), logging.WARNING if self._decoder.why_not else logging.INFO
        if why not in self._said:
            self._said.add(why)
            logger.log(level, "generate does not replay steps as a graph: %s", why)
        return self._plain(model, **given)

    def _replay(self, model: Any, given: dict[str, Any]) -> Any:
        given = _with_stop_strings(given)
        streamer = given.pop("streamer", None)
        held = None if streamer is None else _HeldStreamer(streamer)

        def decode(model: Any, input_ids: torch.Tensor, **more: Any) -> torch.Tensor:
            return self._decoder.decode(model, input_ids, held, **more)

        return self._plain(model, **given, streamer=held, custom_generate=decode)


def _why_not_ours(model: Any, given: dict[str, Any]) -> str:
    """Why a call is for transformers' own loop; nothing if it is not."""
    strange = [name for name in _NOT_OURS if given.get(name) is not None and given[name] is not False]
    if strange:
        return f"{', '.join(strange)} was given"
    if model.generation_config.stop_strings is not None:
        return "the model's own generation config has stop strings"
    if model.training:
        return "the model is in training mode"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is on"
    if modes := [mode for mode in _modes() if not isinstance(mode, DeviceContext)]:
        return f"the mode {type(modes[-1]).__name__} sees each operation"
    if module._global_forward_hooks or module._global_forward_pre_hooks:
        return "hooks are registered on all modules"
    hooked = [type(m).__name__ for m in model.modules() if any(map(_is_strange, (*_hooks(m), *_hooks(m, "_pre"))))]
    return f"hooks are registered on {', '.join(sorted(set(hooked)))}" if hooked else ""


def _modes() -> list[Any]:
    """Of torch that are on in this thread; what they do would be in no replay."""
    functions = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [*functions, *_get_current_dispatch_mode_stack()]


def _hooks(hooked: torch.nn.Module, when: str = "") -> Iterable[Any]:
    """What torch calls before or after a module's forward, which no replay does."""
    found: dict[int, Any] = getattr(hooked, f"_forward{when}_hooks")
    return found.values()


def _is_strange(hook: Any) -> bool:
    """Whether a hook is not one that every model here has."""
    return getattr(hook, "func", None) is not check_fork


def _with_stop_strings(given: dict[str, Any]) -> dict[str, Any]:
    """Stop strings as a criterion: transformers would not hand the tokenizer on for them."""
    config = given.get("generation_config")
    strings = given.get("stop_strings") or getattr(config, "stop_strings", None)
    if strings is None or given.get("tokenizer") is None:
        return dict(given)
    given = {name: value for name, value in given.items() if name != "stop_strings"}
    if isinstance(config, GenerationConfig):
        given["generation_config"] = config = copy.deepcopy(config)
        config.stop_strings = None
    stop = StopStringCriteria(tokenizer=given["tokenizer"], stop_strings=strings)
    given["stopping_criteria"] = StoppingCriteriaList([*(given.get("stopping_criteria") or ()), stop])
    return given


class _HeldStreamer:
    """Passes nothing on before `release`: until then another loop may begin anew."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._held: list[torch.Tensor] | None = []

    def put(self, value: torch.Tensor) -> None:
        """Tokens."""
        if self._held is None:
            self._streamer.put(value)
        else:
            self._held.append(value)

    def release(self) -> None:
        """From now on they go where they are meant to go."""
        held, self._held = self._held or [], None
        for value in held:
            self._streamer.put(value)

    def end(self) -> None:
        """There will be no more."""
        self._streamer.end()
