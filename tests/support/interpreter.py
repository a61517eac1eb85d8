"""Triton's interpreter made quicker: it replaces functions of `triton.language` again in each call within a kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest


def patch_once(patch: pytest.MonkeyPatch) -> None:
    """Leave out what a kernel, or an earlier call, has replaced already. Other versions of Triton stay as they are."""
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_patch_lang") or not hasattr(interpreter, "_LangPatchScope"):
        return
    replace, scope, core = interpreter._patch_lang, interpreter._LangPatchScope, interpreter.tl.core
    plain = core.range

    @functools.cache
    def modules(function: Callable[..., Any]) -> list[Any]:
        return [module for module in (interpreter.tl, core) if module in function.__globals__.values()]

    def replace_once(function: Callable[..., Any]) -> Any:
        done = all(module.range is not plain for module in modules(function))
        return scope() if done else replace(function)

    patch.setattr(interpreter, "_patch_lang", replace_once)
