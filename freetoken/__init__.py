"""Mixture-of-experts models whose experts do not fit on the GPU, run from quantized host memory.

    model, tokenizer = freetoken.load("path or hub id")     # an ordinary transformers model
    model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=60)
    print(freetoken.report(model))
    freetoken.attach(other, expert_format="nvfp4")          # a transformers model that is in memory already

A reader's path: `load` (integration/transformers.py), then `executor.Executor.run`, then `kernels/_experts.pyx`, then
one `kernels/tile_<format>.h`. docs/architecture.md maps every module. Importing this starts no threads, probes nothing
and imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from freetoken.errors import (
    CapacityError,
    CheckpointError,
    ClosedError,
    ConfigError,
    FormatError,
    FreeTokenError,
    RowError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from freetoken.integration.attach import attach
    from freetoken.integration.transformers import load
    from freetoken.model_report import count_statistics, report

try:
    __version__ = importlib.metadata.version("freetoken")
except importlib.metadata.PackageNotFoundError:  # run from a checkout that was not installed
    __version__ = "unknown"

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "FormatError",
    "FreeTokenError",
    "RowError",
    "UnsupportedError",
    "__version__",
    "attach",
    "count_statistics",
    "load",
    "report",
]


def __getattr__(name: str) -> Any:
    """What is not here yet is imported when it is first used."""
    if name in ("load", "attach"):
        module = "transformers" if name == "load" else "attach"
        try:
            return getattr(importlib.import_module(f"freetoken.integration.{module}"), name)
        except ModuleNotFoundError as error:
            raise UnsupportedError(
                f"{error.name} is not installed, and {name}() needs it: pip install freetoken[models]",
                feature=str(error.name),
            ) from error
    if name in ("report", "count_statistics"):
        return getattr(importlib.import_module("freetoken.model_report"), name)
    raise AttributeError(f"module 'freetoken' has no attribute {name!r}")
