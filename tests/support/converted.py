"""Converted folders for tests: made by the package from checkpoints that tests write, and damaged by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from freetoken import formats
from freetoken.checkpoint.convert import Conversion, Converted
from freetoken.checkpoint.export import Export, Exported
from freetoken.checkpoint.open import open_any, scan_any
from freetoken.checkpoint.records import MANIFEST
from tests.support.checkpoints import experts, qwen3_config, write_folder


def convert_folder(source: Path, destination: Path, fmt: str | None = None, threads: int = 2) -> Converted:
    """Convert as `ft convert` does."""
    target = None if fmt is None else formats.get(fmt)
    return Conversion(scan_any(open_any(source), target), destination, target).run(threads)


def export_folder(source: Path, destination: Path, fmt: str | None = None, threads: int = 2) -> Exported:
    """Convert as `ft convert --to compressed-tensors` does."""
    target = None if fmt is None else formats.get(fmt)
    return Export(scan_any(open_any(source), target), target).write(destination, threads)


def write_experts(folder: Path, layers: int, dialect: str = "bf16") -> Path:
    """A checkpoint of nothing but experts and one norm: it converts, and no model loads from it."""
    rng = np.random.default_rng(0)
    tensors = {"model.norm.weight": ("BF16", np.zeros(64, np.uint16))}
    for layer in range(layers):
        tensors |= experts(rng, dialect, f"model.layers.{layer}.mlp.experts")
    return write_folder(folder, qwen3_config(num_hidden_layers=layers), tensors)


def contents(folder: Path) -> dict[str, bytes]:
    """File name -> bytes."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest as JSON."""
    file = folder / MANIFEST
    manifest = json.loads(file.read_text())
    edit(manifest)
    file.write_text(json.dumps(manifest))


def flip_bit(file: Path, at: int, bit: int = 0) -> None:
    """Flip one bit of a file, read-only or not."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.chmod(0o644)
    file.write_bytes(data)
