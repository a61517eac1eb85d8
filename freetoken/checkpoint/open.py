"""Opens whatever a path names, a folder of safetensors, a converted one or a GGUF file, and finds its experts."""

from __future__ import annotations

import os
from pathlib import Path

from freetoken.checkpoint.experts import ExpertScan
from freetoken.checkpoint.gguf import GgufCheckpoint, open_gguf
from freetoken.checkpoint.gguf_experts import scan_gguf
from freetoken.checkpoint.records import RecordCheckpoint, is_converted, open_records, scan_records
from freetoken.checkpoint.safetensors import Checkpoint, open_checkpoint
from freetoken.checkpoint.scan import scan
from freetoken.errors import CheckpointError
from freetoken.formats.base import Format


def open_any(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the headers of a folder or of a GGUF file; raises `CheckpointError`."""
    place = Path(path)
    if os.path.isfile(place) and place.suffix == ".gguf":
        return open_gguf(place)
    if str(path) and os.path.isdir(place) and not (place / "config.json").exists():
        files = sorted(file.name for file in place.glob("*.gguf"))
        if files:
            raise CheckpointError(
                f"{place} holds GGUF files; name the one to load: {', '.join(files[:8])}", file=str(place)
            )
    return open_records(place) if is_converted(place) else open_checkpoint(path)


def scan_any(checkpoint: Checkpoint, fmt: Format | None = None) -> ExpertScan:
    """Find all experts from headers; fmt: what they will be re-quantized to, if anything."""
    if isinstance(checkpoint, RecordCheckpoint):
        return scan_records(checkpoint)
    return scan_gguf(checkpoint, fmt) if isinstance(checkpoint, GgufCheckpoint) else scan(checkpoint)
