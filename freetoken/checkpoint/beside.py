"""All of a model that is not experts, when it is written again: tensors streamed into safetensors, files copied.

Tensors go from file to file byte for byte, in pieces, whatever their size. A source that does not hold them as
safetensors do makes its own `Beside` (integration/gguf.py).
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.experts import ExpertScan
from freetoken.checkpoint.gguf import GgufCheckpoint
from freetoken.checkpoint.records import MANIFEST
from freetoken.checkpoint.safetensors import DTYPES, INDEX, SINGLE, TensorInfo, read_exactly
from freetoken.errors import UnsupportedError

_PIECE = 16 << 20
"""Bytes of the dense part that are copied at once."""
_MAX_FILE = 5 << 30
"""Bytes of tensors in one safetensors file; a larger tensor has a file of its own."""
_SIDE = {".json", ".jinja", ".md", ".model", ".py", ".tiktoken", ".txt"}
"""Endings of the files that stand beside weights and go along: config, tokenizer, chat template, code, licence."""


@dataclass(frozen=True)
class DenseTensor:
    """A tensor to be written beside the experts; `pieces` gives its bytes in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
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
        for path in folder.iterdir():
            is_side = path.suffix in _SIDE or path.name.startswith(("LICENSE", "NOTICE"))
            if is_side and path.is_file() and not path.name.endswith((".index.json", MANIFEST)):
                shutil.copyfile(path, target / path.name)

    tensors = (info for name, info in found.checkpoint.tensors.items() if name not in experts)
    return Beside(tuple(_stored(info) for info in tensors), write_files)


def _stored(info: TensorInfo) -> DenseTensor:
    def pieces() -> Iterator[NDArray[np.uint8]]:
        for start in range(0, info.nbytes, _PIECE):
            piece = np.empty(min(_PIECE, info.nbytes - start), np.uint8)
            read_exactly(info, info.offset + start, piece)
            yield piece

    return DenseTensor(info.name, info.dtype, info.shape, info.nbytes, pieces)


def deal_out(tensors: Iterable[DenseTensor]) -> dict[str, list[DenseTensor]]:
    """File name -> its tensors, in the order given, as many to a file as fit; at least one file."""
    files: list[list[DenseTensor]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(t.nbytes for t in files[-1]) + tensor.nbytes > _MAX_FILE:
            files.append([])
        files[-1].append(tensor)
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{n + 1:05}-of-{len(files):05}.safetensors": file for n, file in enumerate(files)}


def write_safetensors(file: Path, tensors: Iterable[DenseTensor], on_bytes: Callable[[int], object]) -> None:
    """One file, the widest types first: then each tensor is aligned, which readers that map the file want."""
    ordered = sorted(tensors, key=lambda tensor: (-np.dtype(DTYPES[tensor.dtype]).itemsize, tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text = text.ljust(math.ceil(len(text) / 8) * 8)
    with file.open("wb", buffering=0) as stream:
        at = write_at(stream.fileno(), 0, np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8))
        for tensor in ordered:
            for piece in tensor.pieces():
                at += write_at(stream.fileno(), at, piece)
                on_bytes(piece.nbytes)
        os.fsync(stream.fileno())


def write_at(fd: int, offset: int, data: NDArray[np.uint8]) -> int:
    """Write all of `data` at an offset of a file; returns the bytes written. Raises OSError."""
    done = 0
    while done < data.nbytes:
        done += os.pwrite(fd, data[done:].data, offset + done)
    return done


def write_index(folder: Path, shards: Mapping[str, Iterable[DenseTensor]]) -> None:
    """The index that says which tensor is in which of several files."""
    where = {tensor.name: name for name, tensors in shards.items() for tensor in tensors}
    total = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1))
