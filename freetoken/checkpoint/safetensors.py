"""Reads a folder of safetensors: every header is checked against its file before any tensor is read.

Layout: https://huggingface.co/docs/safetensors (8 bytes header length, JSON header, data). Raw bit patterns are
returned, because NumPy knows neither bf16 nor fp8; formats say what they mean.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from reprlib import repr as shown
from typing import Any, BinaryIO, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from freetoken.errors import CheckpointError

DTYPES: dict[str, Any] = {
    "BOOL": np.uint8,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "F8_E8M0": np.uint8,
    "I16": np.int16,
    "U16": np.uint16,
    "F16": np.float16,
    "BF16": np.uint16,
    "I32": np.int32,
    "U32": np.uint32,
    "F32": np.float32,
    "I64": np.int64,
    "U64": np.uint64,
    "F64": np.float64,
    "C64": np.complex64,
}
"""safetensors dtype -> the NumPy type of its bits."""

_ITEM_BYTES = {name: np.dtype(bits).itemsize for name, bits in DTYPES.items()}

_MAX_HEADER = 100_000_000  # the format's own limit; the index of 130,000 tensors takes 13 MB
_MAX_SIZE = 2**63
_NEAR = 1 << 14  # bytes from one small tensor to the next that are read rather than skipped
_MAX_NAME = 1024  # as for GGUF
_MAX_DIMS = 8  # those of experts have 4 at most; NumPy allows 64 and fails at more
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


Bytes = NDArray[np.uint8]
Take = Callable[[int], Bytes]


class TensorInfo(NamedTuple):
    """Where one tensor lies: its dtype name, shape, file, absolute offset and size in bytes.

    A tuple, because there are 130,000 in some checkpoints and a frozen dataclass takes four times longer to make.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A folder: its config, its sidecar quantization config if any, and every tensor by name."""

    path: Path
    config: Mapping[str, Any]
    sidecar: Mapping[str, Any] | None
    tensors: Mapping[str, TensorInfo]

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of the config: the whole, or `text_config` inside a multimodal one."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config

    @property
    def config_file(self) -> Path:
        """Where the config is written, for messages."""
        return self.path / "config.json"

    def read(self, name: str, index: int | None = None) -> NDArray[Any]:
        """The raw bits of a tensor, or of its slice `index` along the first dimension."""
        info = self.tensors[name]
        shape = info.shape if index is None else info.shape[1:]
        tensor: NDArray[Any] = self.read_bytes(name, index, _buffers.take).view(DTYPES[info.dtype]).reshape(shape)
        return tensor

    def read_bytes(self, name: str, index: int | None = None, take: Take = lambda n: np.empty(n, np.uint8)) -> Bytes:
        """The same as bytes; take: what gives the memory for so many."""
        info = self.tensors[name]
        offset, nbytes = info.offset, info.nbytes
        if index is not None:
            nbytes //= info.shape[0]
            offset += index * nbytes
        data = take(nbytes)
        read_exactly(info, offset, data)
        return data

    def read_together(self, names: Sequence[str]) -> list[NDArray[Any]]:
        """The raw bits of many small tensors, in as few reads as their places in the files allow."""
        infos = sorted((self.tensors[name] for name in names), key=attrgetter("file", "offset"))
        runs: list[list[TensorInfo]] = []
        for info in infos:
            last = runs[-1][-1] if runs else None
            if last is None or last.file != info.file or info.offset - last.offset > _NEAR:
                runs.append([])
            runs[-1].append(info)
        found: dict[str, NDArray[Any]] = {}
        for run in runs:
            start = run[0].offset
            data = np.empty(max(info.offset + info.nbytes for info in run) - start, np.uint8)
            read_exactly(run[0], start, data)
            for info in run:
                bits = data[info.offset - start :][: info.nbytes].copy()
                found[info.name] = bits.view(DTYPES[info.dtype]).reshape(info.shape)
        return [found[name] for name in names]


class _Buffers(threading.local):
    """Memory for what a thread reads: new each time, or inside `reuse_buffers` a piece of one that is used again."""

    active = False
    memory: NDArray[np.uint8] = np.empty(0, np.uint8)
    used = 0
    wanted = 0

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        if not self.active:
            return np.empty(nbytes, np.uint8)
        start = self.used
        self.used = start + -(-nbytes // 64) * 64
        self.wanted = max(self.wanted, self.used)
        if self.used <= self.memory.nbytes:
            return self.memory[start : start + nbytes]
        return np.empty(nbytes, np.uint8)


_buffers = _Buffers()


@contextlib.contextmanager
def reuse_buffers() -> Iterator[None]:
    """Inside, what this thread gets from `Checkpoint.read` lies in memory that its next such block uses again.

    The kernel gives new memory page by page and zeroed, which takes as long as reading a cached file.
    """
    if _buffers.memory.nbytes < _buffers.wanted:
        _buffers.memory = np.empty(_buffers.wanted, np.uint8)
    _buffers.active, _buffers.used = True, 0
    try:
        yield
    finally:
        _buffers.active = False


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read config and headers of a local folder.

    Raises `CheckpointError` naming file and tensor when something is missing, truncated or contradicts itself.
    """
    folder = Path(path)
    if not str(path) or not os.path.isdir(folder):
        what = "is a file" if str(path) and os.path.exists(folder) else "does not exist"
        raise CheckpointError(
            f"{str(path)[:200] or repr('')} {what}; expected a folder with config.json and *.safetensors",
            file=str(folder),
        )
    config = read_json(folder / "config.json")
    sidecar_file = folder / "hf_quant_config.json"
    sidecar = read_json(sidecar_file) if os.path.exists(sidecar_file) else None
    return Checkpoint(folder, config, sidecar, _find_tensors(folder))


def read_header(file: Path) -> dict[str, TensorInfo]:
    """All tensors of one safetensors file, every claim of its header checked against the file."""
    with open_file(file) as (stream, size):
        head = stream.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(size - 8, _MAX_HEADER):
            raise CheckpointError(
                f"{file} is truncated or not safetensors: its header claims {length} bytes, the file has {size}; "
                "download it again",
                file=str(file),
            )
        raw = stream.read(length)
    header = _parse_json(raw, file)
    data_start = 8 + length
    tensors = {
        name: _check_entry(file, name, entry, data_start, size)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    check_overlap(file, tensors)
    return tensors


@contextlib.contextmanager
def open_file(file: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A file, for reading, and its size; raises `CheckpointError` when it cannot be read.

    Pipes and devices are refused: opening one may wait for ever, and reading one need not end.
    """
    try:
        with open(file, "rb", opener=_open_now) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{file} cannot be read: it is a pipe or a device, not a file", file=str(file))
            yield stream, status.st_size
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}", file=str(file)) from error


def _open_now(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _check_entry(file: Path, name: str, entry: Any, data_start: int, size: int) -> TensorInfo:
    if len(name) > _MAX_NAME:
        raise _bad(file, name, f"has a name of {len(name)} characters; at most {_MAX_NAME} are allowed")
    if not isinstance(entry, dict):
        raise _bad(file, name, "has no description in the header")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _bad(file, name, f"has dtype {shown(dtype)}, which this version does not know")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMS:
        raise _bad(file, name, f"has shape {shown(shape)}; a list of at most {_MAX_DIMS} sizes is expected")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(file, name, f"has data_offsets {shown(offsets)}; two ascending numbers are expected")
    nbytes = offsets[1] - offsets[0]
    expected = math.prod(shape) * _ITEM_BYTES[dtype]
    if nbytes != expected:
        raise _bad(file, name, f"is {dtype} {shape}, which takes {expected} bytes, but its data has {nbytes}")
    if data_start + offsets[1] > size:
        raise _bad(
            file,
            name,
            f"ends at byte {data_start + offsets[1]} of a file of {size}: the file is truncated; download it again",
        )
    return TensorInfo(name, dtype, tuple(shape), file, data_start + offsets[0], nbytes)


def _bad(file: Path, name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{file}: tensor {name!r} {what}", file=str(file), tensor=name)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    if not isinstance(value, list):
        return False
    for v in value:  # noqa: SIM110 all() of a generator takes twice as long, for each tensor
        if type(v) is not int or not 0 <= v < _MAX_SIZE:
            return False
    return True


def check_overlap(file: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse tensors of one file that share bytes."""
    end, last = 0, ""
    for info in sorted(tensors.values(), key=attrgetter("offset", "nbytes")):
        if info.nbytes and info.offset < end:
            raise CheckpointError(
                f"{file}: tensors {last!r} and {info.name!r} overlap", file=str(file), tensor=info.name
            )
        if info.nbytes:
            end, last = info.offset + info.nbytes, info.name


def _find_tensors(folder: Path) -> dict[str, TensorInfo]:
    index, single = folder / INDEX, folder / SINGLE
    if not os.path.exists(index):
        if not os.path.exists(single):
            found = sorted(_list(folder))[:8]
            raise CheckpointError(
                f"{folder} has neither {SINGLE} nor {INDEX}; found {', '.join(found) or 'nothing'}", file=str(folder)
            )
        return read_header(single)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor to file", file=str(index))
    if os.path.exists(single) and SINGLE not in weight_map.values():
        # transformers would take the single file and ignore the index: two checkpoints saved over each other
        raise CheckpointError(
            f"{folder} holds both {SINGLE} and {INDEX}, which does not name it: two checkpoints in one folder; "
            "remove the files of the one that is not wanted",
            file=str(single),
        )
    tensors: dict[str, TensorInfo] = {}
    where: dict[str, str] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise CheckpointError(f"{index} names {shard!r}, which is not a file name in its folder", file=str(index))
        file = folder / shard
        if not os.path.exists(file):
            wanted = next(name for name, where in weight_map.items() if where == shard)
            raise CheckpointError(
                f"{index.name} names {shard} (tensor {wanted!r} and others), which is not in {folder}; download it",
                file=str(file),
                tensor=wanted,
            )
        header = read_header(file)
        for name in header.keys() & tensors.keys():
            raise CheckpointError(
                f"{folder}: tensor {name!r} is in both {where[name]} and {shard}, and nothing says which one counts; "
                "get the checkpoint again",
                file=str(file),
                tensor=name,
            )
        tensors |= header
        where |= dict.fromkeys(header, shard)
    if not weight_map.items() <= where.items():
        name, shard = next(item for item in weight_map.items() if where.get(item[0]) != item[1])
        raise CheckpointError(
            f"{index.name} says that {name!r} is in {shard}, but its header does not have it",
            file=str(folder / shard),
            tensor=name,
        )
    return tensors


def _list(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}", file=str(folder)) from error


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; raises `CheckpointError`."""
    if not os.path.lexists(file):
        raise CheckpointError(f"{file} is missing; a checkpoint folder needs it", file=str(file))
    with open_file(file) as (stream, size):
        if size > _MAX_HEADER:
            raise CheckpointError(f"{file} has {size} bytes; at most {_MAX_HEADER} are read", file=str(file))
        return _parse_json(stream.read(size), file)


def _parse_json(raw: bytes, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} does not hold valid JSON: {error}", file=str(file)) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a JSON {type(value).__name__}; an object is expected", file=str(file))
    return value


def read_exactly(info: TensorInfo, offset: int, out: NDArray[np.uint8]) -> None:
    """Fill `out` from byte `offset` of a tensor's file on; raises `CheckpointError` where the file ends or fails."""
    view = out.data
    try:
        with open(info.file, "rb", buffering=0, opener=_open_now) as stream:
            stream.seek(offset)
            while view.nbytes:
                got = stream.readinto(view)
                if not got:
                    raise read_error(info)
                view = view[got:]
    except OSError as error:
        raise read_error(info, error) from error


def read_error(info: TensorInfo, error: OSError | None = None) -> CheckpointError:
    """What to raise when a tensor cannot be read, by the system's error or, without one, because its file ended."""
    if error is None:
        what = f"{info.file} ended while tensor {info.name!r} was read; it changed or is truncated"
    else:
        what = f"{info.file}: tensor {info.name!r} cannot be read: {error.strerror}"
    return CheckpointError(what, file=str(info.file), tensor=info.name)
