"""Writes a checkpoint folder: whole or not at all, its tensors in any order and piece by piece.

new_folder      a folder beside the wanted place, renamed to it when everything in it is on the disk
TensorFiles     the safetensors files in it, laid out from names and shapes before a single number is known
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.safetensors import DTYPES, INDEX, SINGLE, Checkpoint, TensorInfo, read_exactly
from freetoken.errors import CapacityError, ConfigError
from freetoken.units import format_bytes

_FILE_BYTES = 4 << 30
"""Tensors beyond this go to a further file; a larger tensor has a file of its own."""
_PIECE = 16 << 20
"""Bytes that are copied at once."""
_OWN = ("config.json", "hf_quant_config.json", "recipe.yaml", INDEX)
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".bank")


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


class TensorFiles:
    """The safetensors files of a folder, `model.safetensors` or several with an index.

    tensors: all that will be written, in the order in which they are dealt out to files. Every byte of them is put
    once, from any thread; `close` finishes. Layout: https://huggingface.co/docs/safetensors; within a file wider
    elements come first, so that every tensor is aligned.
    """

    def __init__(self, folder: Path, tensors: Sequence[NewTensor], file_bytes: int = _FILE_BYTES) -> None:
        self._folder = folder
        self._places: dict[str, tuple[NewTensor, int, int]] = {}
        self._left = {tensor.name: tensor.nbytes for tensor in tensors}
        self._lock = threading.Lock()
        self._files: dict[str, int] = {}
        parts = _deal_out(tensors, file_bytes)
        for number, part in enumerate(parts, 1):
            name = SINGLE if len(parts) == 1 else f"model-{number:05}-of-{len(parts):05}.safetensors"
            self._files[name] = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            self._begin(self._files[name], sorted(part, key=lambda t: -t.item_bytes))
        if len(parts) > 1:
            names = dict(zip(self._files.values(), self._files, strict=True))
            where = {name: names[fd] for name, (_, fd, _) in self._places.items()}
            total = sum(tensor.nbytes for tensor in tensors)
            (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1))

    def _begin(self, fd: int, tensors: list[NewTensor]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for tensor in tensors:
            offsets = [at, at + tensor.nbytes]
            header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
            at = offsets[1]
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        start = 8 + len(raw)
        _write_at(fd, 0, np.frombuffer(len(raw).to_bytes(8, "little") + raw, np.uint8))
        os.truncate(fd, start + at)
        for tensor in tensors:
            self._places[tensor.name] = tensor, fd, start + header[tensor.name]["data_offsets"][0]

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
        for start in range(0, source.nbytes, _PIECE):
            piece = np.empty(min(_PIECE, source.nbytes - start), np.uint8)
            read_exactly(source, source.offset + start, piece)
            self._write(name, fd, offset + start, piece)

    def _write(self, name: str, fd: int, offset: int, data: NDArray[np.uint8]) -> None:
        _write_at(fd, offset, data)
        with self._lock:
            self._left[name] -= data.nbytes

    def close(self, complete: bool = True) -> None:
        """Close the files; complete: everything was put."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
        missing = [name for name, left in self._left.items() if left]
        assert not (complete and missing), f"never or twice put: {missing[:8]}"


@contextlib.contextmanager
def new_folder(destination: Path, nbytes: int) -> Iterator[Path]:
    """A folder that becomes `destination` when the block ends, or goes away with everything in it when it fails.

    nbytes: what will be written there. Raises `ConfigError` for a destination that is not free or not to be written,
    and `CapacityError` where the disk is or becomes too small.
    """
    place = Path(os.path.abspath(destination))
    _check_free(place)
    partial = place.with_name(f".{place.name}.{secrets.token_hex(4)}.partial")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _require_space(place.parent, nbytes)
        partial.mkdir()
        yield partial
        for path in [*partial.iterdir(), partial]:
            _sync(path)
        _check_free(place)
        partial.rename(place)
        _sync(place.parent)
    except OSError as error:
        raise _write_error(error, place, nbytes) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """config.json."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def copy_side_files(source: Checkpoint, folder: Path) -> None:
    """What stands beside weights and goes along unchanged: tokenizer, chat template, code, licence."""
    for path in source.path.iterdir():
        if path.is_file() and path.name not in _OWN and path.suffix not in _WEIGHTS and path.name[0] != ".":
            shutil.copyfile(path, folder / path.name)


def _deal_out(tensors: Sequence[NewTensor], file_bytes: int) -> list[list[NewTensor]]:
    parts: list[list[NewTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if parts[-1] and size + tensor.nbytes > file_bytes:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.nbytes
    return parts


def _write_at(fd: int, offset: int, data: NDArray[np.uint8]) -> None:
    view = data.data
    while view.nbytes:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_free(place: Path) -> None:
    if os.path.lexists(place) and not (place.is_dir() and not any(place.iterdir())):
        raise ConfigError(
            f"{place} exists already; name a folder that does not, or remove it first",
            name="destination",
            value=str(place),
            expected="a folder that does not exist or is empty",
        )


def _require_space(place: Path, nbytes: int) -> None:
    free = shutil.disk_usage(place).free
    if nbytes > free:
        raise CapacityError(
            f"{format_bytes(nbytes)} are to be written to {place}, and the disk has {format_bytes(free)} left: free "
            "some, or choose another place or a smaller format",
            needed=nbytes,
            available=free,
            where=str(place),
        )


def _write_error(error: OSError, place: Path, nbytes: int) -> CapacityError | ConfigError:
    what = f"{error.filename or place} cannot be written: {error.strerror or error}; nothing of it stays"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(place.parent).free if place.parent.is_dir() else 0
        return CapacityError(f"{what}. Make room first", needed=nbytes, available=free, where=str(place.parent))
    return ConfigError(what, name="destination", value=str(place), expected="a place to write to")
