"""Patterns of module names, in configs: a name, the end of one, a shell pattern, or "re:" and a regular expression.

A regular expression from a file may be made so that matching takes for ever: `(a+)+$`. The ways in which a backtracking
matcher could go through one are counted on its syntax tree before it is used; length alone would bound nothing.
"""

from __future__ import annotations

import fnmatch
import importlib
import math
import re
import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache
from reprlib import repr as shown
from typing import Any

from freetoken.errors import CheckpointError

_MAX_WAYS = 1e6
"""9 ms of matching, measured; four `.*` in a pattern for names of modules stay below, and a hundred patterns of two."""

_MAX_GROUPS = 200
"""More within each other would go deep into Python's stack."""

_MAX_RANGE = 256
"""Compiling goes through each character of a range, up to a million of them."""

_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
_parse: Any = importlib.import_module("re._parser").parse


def match_any(patterns: Iterable[str], module: str) -> bool:
    """Whether a module is named by any pattern.

    Tools differ in what they call the models around the layers, so names are also compared without them. Raises
    `CheckpointError` naming a regular expression with which this could take too long; what is none matches nothing.
    """
    plain = plain_name(module)
    ways = 0.0
    for pattern in patterns:
        if pattern.startswith("re:"):
            ways += _count_ways(pattern[3:], len(module) + len("model."))
            if ways > _MAX_WAYS:
                raise CheckpointError(
                    f"the config's pattern {shown(pattern)} could take for ever to match {shown(module)}: it has "
                    "repeats in repeats, or too many of them, of groups or of characters; write it with fewer"
                )
            compiled = _compile(pattern[3:])
            if compiled is not None and any(compiled.match(name) for name in (module, plain, f"model.{plain}")):
                return True
        elif _matches_name(pattern, module, plain):
            return True
    return False


def plain_name(module: str) -> str:
    """Without the names of the models around the layers: model.language_model.layers.0 is layers.0."""
    return ".".join(part for part in module.split(".") if part not in ("model", "language_model"))


def _matches_name(pattern: str, module: str, plain: str) -> bool:
    wanted = plain_name(pattern)
    return (
        plain == wanted
        or plain.startswith(wanted + ".")
        or plain.endswith("." + wanted)
        or fnmatch.fnmatchcase(module, pattern)
        or fnmatch.fnmatchcase(plain, wanted)
    )


@lru_cache(maxsize=4096)
def _compile(pattern: str) -> re.Pattern[str] | None:
    compiled: re.Pattern[str] | None = _quietly(lambda: re.compile(pattern))
    return compiled


@lru_cache(maxsize=4096)
def _count_ways(pattern: str, n: int) -> float:
    """A bound on the ways through a pattern on n characters, infinite for one too large; 0 for what is none."""
    if pattern.count("(") > _MAX_GROUPS:
        return math.inf
    tree = _quietly(lambda: list(_parse(pattern)))
    if tree is None:
        return 0.0
    log_ways = _quietly(lambda: _log_ways(tree[:-1] if tree and _ends_freely(*tree[-1]) else tree, n))
    return math.inf if log_ways is None else math.exp(min(log_ways, 99.0))


def _quietly(function: Callable[[], Any]) -> Any:
    """What a function returns; None where a pattern is none, or deeper than Python's stack."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function()
        except (re.error, ValueError, RecursionError, OverflowError):
            return None


def _ends_freely(code: Any, value: Any) -> bool:
    """Whether the last part is `.*` or like it: nothing that could fail follows, so it is taken in one way."""
    return code.name in _REPEATS and value[0] <= 1 and [c.name for c, _ in value[2]] in (["ANY"], ["IN"])


def _log_ways(tree: Any, n: int) -> float:
    """Logarithm of a bound on the ways through a part of a pattern."""
    total = 0.0
    for code, value in tree:
        if code.name in _REPEATS:
            low, high, body = int(value[0]), min(int(value[1]), n), value[2]
            # low counts too: what matches nothing may be repeated four billion times
            total += max(low, high, 1) * _log_ways(body, n) + math.log(max(low, high - low + 1, 1))
        elif code.name == "BRANCH":
            total += max(_log_ways(branch, n) for branch in value[1]) + math.log(len(value[1]))
        elif code.name == "GROUPREF_EXISTS":
            total += max(_log_ways(branch or (), n) for branch in value[1:])
        elif code.name in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
            total += _log_ways(value[-1], n)
        elif code.name == "IN":
            if any(kind.name == "RANGE" and item[1] - item[0] > _MAX_RANGE for kind, item in value):
                return math.inf
        elif code.name == "ATOMIC_GROUP":
            total += _log_ways(value, n)
    return total
