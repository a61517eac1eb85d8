"""Formats: how experts are held. One file per format is all there is; `get` and `names` find them.

To add one: `formats/<name>.py` with a `Format` subclass and `FORMAT = <it>()` (sections, NumPy quantize and dequantize,
checkpoint spellings), `kernels/tile_<name>.h` with its tiles (scalar first), `kernels/_tile_<name>.pyx` that lists
them, and `gpu/tile_<name>.py`, unless it shares another's (`Format.kernels`). Nothing else names formats.

    checkpoint tensors --spelling--> Matrix (row-major codes, scales, global) --record.pack--> record in a bank
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from freetoken.errors import ConfigError
from freetoken.formats.base import Format, Matrix, Spelling

__all__ = ["Format", "Matrix", "Spelling", "get", "names"]


@cache
def _registry() -> dict[str, Format]:
    found: dict[str, Format] = {}
    for module in pkgutil.iter_modules(__path__):
        fmt = getattr(importlib.import_module(f"{__name__}.{module.name}"), "FORMAT", None)
        if fmt is not None:
            found[fmt.name] = fmt
    return found


def names() -> tuple[str, ...]:
    """Names of all formats, sorted."""
    return tuple(sorted(_registry()))


def get(name: str) -> Format:
    """The format of that name; raises `ConfigError` listing the known ones."""
    fmt = _registry().get(name) if isinstance(name, str) else None
    if fmt is None:
        expected = ", ".join(names())
        raise ConfigError(
            f"unknown expert format {name!r}; known formats: {expected}",
            name="expert_format",
            value=name,
            expected=expected,
        )
    return fmt
