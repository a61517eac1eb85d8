"""All of a model that is not experts, when it is written again: tensors streamed into safetensors, files copied.

Tensors go from file to file byte for byte, in pieces, whatever their size. A source that does not hold them as
safetensors do makes its own `Beside` (integration/gguf.py).
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.experts import ExpertScan
from freetoken.checkpoint.gguf import GgufCheckpoint
from freetoken.checkpoint.records import MANIFEST
from freetoken.checkpoint.write import NewTensor, lay_out, read_pieces, side_files, write_at
from freetoken.errors import UnsupportedError


@dataclass(frozen=True)
class DenseTensor(NewTensor):
    """A tensor to be written beside the experts; `pieces` gives its bytes in order."""

    pieces: Callable[[], Iterator[NDArray[np.uint8]]]


@dataclass(frozen=True)
class Beside:
    """All of a model that is not experts: its tensors, and what writes config, tokenizer and the like to a folder."""

    tensors: tuple[DenseTensor, ...]
    write_files: Callable[[Path], None]


def stored_beside(found: ExpertScan) -> Beside:
    """Everything but experts as it lies in a folder of safetensors, byte for byte."""
    if isinstance(found.checkpoint, GgufCheckpoint):
        raise UnsupportedError(
            f"{found.checkpoint.path}: the dense part of a GGUF file is not written as it lies there", feature="GGUF"
        )
    folder, experts = found.checkpoint.path, found.expert_tensors

    def write_files(target: Path) -> None:
        for path in side_files(folder):
            if path.name != MANIFEST:
                shutil.copyfile(path, target / path.name)

    stored = (info for name, info in found.checkpoint.tensors.items() if name not in experts)
    tensors = (DenseTensor(info.name, info.dtype, info.shape, partial(read_pieces, info)) for info in stored)
    return Beside(tuple(tensors), write_files)


def write_safetensors(file: Path, tensors: Iterable[DenseTensor], on_bytes: Callable[[int], object]) -> int:
    """One file, on the disk when this returns; its CRC-32."""
    header, placed = lay_out(tensors)
    with file.open("wb", buffering=0) as stream:
        at = write_at(stream.fileno(), 0, header)
        checksum = zlib.crc32(header.data)
        for tensor, _ in placed:
            for piece in tensor.pieces():
                at += write_at(stream.fileno(), at, piece)
                checksum = zlib.crc32(piece.data, checksum)
                on_bytes(piece.nbytes)
        os.fsync(stream.fileno())
    return checksum


def file_checksum(file: Path) -> int:
    """The CRC-32 of a file."""
    checksum = 0
    with file.open("rb", buffering=0) as stream:
        while piece := stream.read(16 << 20):
            checksum = zlib.crc32(piece, checksum)
    return checksum
