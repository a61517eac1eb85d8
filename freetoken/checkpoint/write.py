"""Writes the files of a checkpoint folder: its tensors in any order and piece by piece.

TensorFiles     the safetensors files, laid out from names and shapes before a single number is known

The rest are smaller parts, of `convert.py` too; `journal.py` makes the folder.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.safetensors import DTYPES, INDEX, SINGLE, TensorInfo, read_exactly
from freetoken.errors import CapacityError, ConfigError
from freetoken.units import format_bytes

_FILE_BYTES = 4 << 30
"""Tensors beyond this go to a further file; a larger tensor has a file of its own."""
_PIECE = 16 << 20
"""Bytes that are copied at once."""
_SIDE = {".json", ".jinja", ".md", ".model", ".tiktoken", ".txt"}
"""Endings of the files that stand beside weights and go along: config, tokenizer, chat template, licence."""


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written: its safetensors dtype and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return int(np.dtype(DTYPES[self.dtype]).itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.item_bytes


T = TypeVar("T", bound=NewTensor)


class TensorFiles:
    """The safetensors files of a folder, `model.safetensors` or several with an index.

    tensors: all that will be written, in the order in which they are dealt out to files. Every byte of them is put
    once, from any thread; `close` finishes.
    """

    def __init__(self, folder: Path, tensors: Sequence[NewTensor], file_bytes: int | None = None) -> None:
        self._places: dict[str, tuple[NewTensor, int, int]] = {}
        self._left = {tensor.name: tensor.nbytes for tensor in tensors}
        self._lock = threading.Lock()
        self._files: list[int] = []
        shards = deal_out(tensors, file_bytes)
        for name, shard in shards.items():
            fd = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            self._files.append(fd)
            header, placed = lay_out(shard)
            write_at(fd, 0, header)
            os.truncate(fd, len(header) + sum(tensor.nbytes for tensor in shard))
            self._places |= {tensor.name: (tensor, fd, offset) for tensor, offset in placed}
        write_index(folder, shards)

    def put(self, name: str, array: NDArray[Any], index: int | None = None) -> None:
        """The bits of a tensor, or of its slice `index` along the first dimension."""
        tensor, fd, offset = self._places[name]
        shape = tensor.shape if index is None else tensor.shape[1:]
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if array.shape != shape or data.nbytes != math.prod(shape) * tensor.item_bytes:
            raise ValueError(f"{name}: {array.dtype} {array.shape} is not {tensor.dtype} {shape}")
        self._write(name, fd, offset + (index or 0) * data.nbytes, data)

    def copy(self, name: str, source: TensorInfo) -> None:
        """All of a tensor of the same size, from another file."""
        tensor, fd, offset = self._places[name]
        assert source.nbytes == tensor.nbytes, f"{name} is not as large as {source.name}"
        for piece in read_pieces(source):
            self._write(name, fd, offset, piece)
            offset += piece.nbytes

    def _write(self, name: str, fd: int, offset: int, data: NDArray[np.uint8]) -> None:
        write_at(fd, offset, data)
        with self._lock:
            self._left[name] -= data.nbytes

    def close(self, complete: bool = True) -> None:
        """Close the files; complete: everything was put."""
        for fd in self._files:
            os.close(fd)
        self._files.clear()
        missing = [name for name, left in self._left.items() if left]
        assert not (complete and missing), f"never or twice put: {missing[:8]}"


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """config.json."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def side_files(folder: Path) -> list[Path]:
    """What goes along with weights: config, tokenizer, chat template, licence, code if a config names it."""
    has_code = any(b'"auto_map"' in path.read_bytes() for path in folder.glob("*config.json") if path.is_file())
    return [
        path
        for path in folder.iterdir()
        if (path.suffix in _SIDE or (has_code and path.suffix == ".py") or path.name.startswith(("LICENSE", "NOTICE")))
        and path.is_file()
        and not path.name.endswith(".index.json")
    ]


def deal_out(tensors: Iterable[T], file_bytes: int | None = None) -> dict[str, list[T]]:
    """File name -> its tensors, in the order given, as many to a file as fit; at least one file."""
    files: list[list[T]] = [[]]
    size = 0
    for tensor in tensors:
        if files[-1] and size + tensor.nbytes > (file_bytes or _FILE_BYTES):
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.nbytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{n + 1:05}-of-{len(files):05}.safetensors": file for n, file in enumerate(files)}


def lay_out(tensors: Iterable[T]) -> tuple[NDArray[np.uint8], list[tuple[T, int]]]:
    """A file's header, and its tensors in the order in which they follow, with their places in the file.

    Layout: https://huggingface.co/docs/safetensors. Wider elements come first, so that every tensor is aligned.
    """
    ordered = sorted(tensors, key=lambda tensor: (-tensor.item_bytes, tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = [], 0
    for tensor in ordered:
        starts.append(end)
        end += tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [starts[-1], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    raw = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    return raw, [(tensor, len(raw) + start) for tensor, start in zip(ordered, starts, strict=True)]


def write_index(folder: Path, shards: Mapping[str, Iterable[NewTensor]]) -> None:
    """The index that says which tensor is in which of several files; nothing for one."""
    if len(shards) > 1:
        where = {tensor.name: name for name, tensors in shards.items() for tensor in tensors}
        total = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors)
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1))


def read_pieces(info: TensorInfo) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a stored tensor, in order, a few at a time."""
    for start in range(0, info.nbytes, _PIECE):
        piece = np.empty(min(_PIECE, info.nbytes - start), np.uint8)
        read_exactly(info, info.offset + start, piece)
        yield piece


def write_at(fd: int, offset: int, data: NDArray[np.uint8]) -> int:
    """Write all of `data` at an offset of a file; returns the bytes written. Raises OSError."""
    done = 0
    while done < data.nbytes:
        done += os.pwrite(fd, data[done:].data, offset + done)
    return done


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def free_place(destination: str | os.PathLike[str]) -> Path:
    """Where a folder will be made, links and `..` followed; raises `ConfigError` unless it is free."""
    if not os.fspath(destination):
        raise ConfigError(
            "the destination is an empty name; name the folder to make",
            name="destination",
            value="",
            expected="a folder that does not exist or is empty",
        )
    check_free(Path(destination))
    place = Path(os.path.realpath(destination))
    check_free(place)
    return place


def check_free(place: Path) -> None:
    """Raise `ConfigError` unless a folder may be made there: nothing is, or an empty folder."""
    if os.path.lexists(place) and not (place.is_dir() and not any(place.iterdir())):
        raise ConfigError(
            f"{place} exists already; name a folder that does not, or remove it first",
            name="destination",
            value=str(place),
            expected="a folder that does not exist or is empty",
        )


def require_space(place: Path, nbytes: int) -> None:
    """Raise `CapacityError` unless the disk of a folder has so much left."""
    free = shutil.disk_usage(place).free
    if nbytes > free:
        raise CapacityError(
            f"{format_bytes(nbytes)} are to be written to {place}, and the disk has {format_bytes(free)} left: free "
            "some, or choose another place or a smaller format",
            needed=nbytes,
            available=free,
            where=str(place),
        )


def write_error(error: OSError, place: Path, nbytes: int, kept: str) -> CapacityError | ConfigError:
    """What to raise for an error of the system; kept: what stays of the work."""
    what = f"{error.filename or place} cannot be written: {error.strerror or error}; {kept}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(place.parent).free if place.parent.is_dir() else 0
        return CapacityError(
            f"{what}. Make room and run the same command again",
            needed=nbytes,
            available=free,
            where=str(place.parent),
        )
    return ConfigError(what, name="destination", value=str(place), expected="a place to write to")
