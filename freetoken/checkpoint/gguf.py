"""Reads GGUF files: every claim of a header is checked against its file before any tensor is read.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (magic, version, counts, metadata, tensor table,
aligned data), one file or the parts that llama.cpp's gguf-split writes. What blocks mean is `gguf_experts.py`'s matter,
what metadata mean `gguf_config.py`'s. The gguf package gives the constants; its reader trusts what it reads.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as shown
from typing import Any, BinaryIO, NamedTuple

from freetoken.checkpoint.gguf_config import config_of
from freetoken.checkpoint.safetensors import Checkpoint, TensorInfo, check_overlap, open_file
from freetoken.errors import CheckpointError, UnsupportedError

_MAX_HEADER = 100_000_000  # as for safetensors; the vocabularies of 2026 take 10 MB
_MAX_DIMS = 4
_MAX_NAME = 1024  # the longest names have 70 bytes; what is longer is damage, and would only fill messages
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a metadata value -> its struct character."""
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class Array(NamedTuple):
    """A metadata array that was checked and passed over: type and number of its values, and where they begin."""

    kind: int
    length: int
    offset: int


@dataclass(frozen=True)
class Header:
    """One file: its metadata and where its tensors lie."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


@dataclass(frozen=True)
class GgufCheckpoint(Checkpoint):
    """A model in GGUF: `path` is its (first) file, `config` is made from the metadata in config.json's terms.

    A tensor's dtype is ggml's name of its type, its shape is rows first, as everywhere here.
    """

    architecture: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config_file(self) -> Path:
        return self.path


def open_gguf(path: str | os.PathLike[str]) -> GgufCheckpoint:
    """Read the header of a file, and of all its parts when it is one of several.

    Raises `CheckpointError` naming file and tensor when something is missing, truncated or contradicts itself.
    """
    file = Path(path)
    header = read_header(file)
    parts = _find_parts(file, header)
    headers = [header if part == file else read_header(part) for part in parts]
    tensors: dict[str, TensorInfo] = {}
    for number, (part, found) in enumerate(zip(parts, headers, strict=True)):
        if len(parts) > 1 and (found.metadata.get("split.no"), found.metadata.get("split.count")) != (
            number,
            len(parts),
        ):
            raise _error(part, f"its header does not say that it is part {number + 1} of {len(parts)}")
        for name in tensors.keys() & found.tensors.keys():
            raise _error(part, f"tensor {name!r} is in {tensors[name].file.name} too", name)
        tensors.update(found.tensors)
    metadata = headers[0].metadata
    expected = metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise _error(parts[0], f"its {len(parts)} parts should hold {shown(expected)} tensors and hold {len(tensors)}")
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or len(architecture) > 64:
        raise _error(parts[0], f"its general.architecture is {shown(architecture)}, expected a short name")
    return GgufCheckpoint(parts[0], config_of(parts[0], metadata, tensors), None, tensors, architecture, metadata)


def read_header(file: Path) -> Header:
    """Metadata and tensors of one file; nothing larger than the file is allocated, whatever it claims."""
    with _open(file) as cursor:
        return _read_header(cursor, cursor.size)


def read_token(checkpoint: GgufCheckpoint, token: int) -> str | None:
    """The vocabulary's string of an id, or None when there is no such token."""
    tokens = checkpoint.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Array) or tokens.kind != _STRING or not 0 <= token < tokens.length:
        return None
    with _open(checkpoint.path) as cursor:
        cursor.skip(tokens.offset)
        for _ in range(token):
            cursor.skip(cursor.take("Q"))
        return cursor.string()


@contextlib.contextmanager
def _open(file: Path) -> Iterator[_Cursor]:
    with open_file(file) as (stream, size):
        yield _Cursor(file, stream, size)


def gguf_package() -> Any:
    """The gguf package; raises `UnsupportedError` in one line where it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise UnsupportedError("GGUF files need the gguf package: pip install gguf", feature="gguf") from error
    return gguf


class _Cursor:
    """Reads a header from front to back, never beyond the file or the limit of headers."""

    def __init__(self, file: Path, stream: BinaryIO, size: int) -> None:
        self.file, self.stream = file, stream
        self.size = size
        self.data = bytearray()
        self.at = 0

    def need(self, nbytes: int) -> None:
        """Have the next bytes in memory."""
        end = self.at + nbytes
        if end > self.size:
            raise _error(self.file, f"its header goes on beyond the end of the file ({self.size} bytes): truncated")
        if end > _MAX_HEADER:
            raise _error(self.file, f"its header is larger than {_MAX_HEADER} bytes; no model's is")
        while len(self.data) < end:
            more = self.stream.read(min(1 << 16, self.size - len(self.data)))
            if not more:
                raise _error(self.file, "it ended while its header was read; it changed or is truncated")
            self.data += more

    def take(self, kind: str) -> Any:
        """The next number."""
        nbytes = struct.calcsize("<" + kind)
        self.need(nbytes)
        (value,) = struct.unpack_from("<" + kind, self.data, self.at)
        self.at += nbytes
        return value

    def skip(self, nbytes: int) -> None:
        """Pass over bytes."""
        self.need(nbytes)
        self.at += nbytes

    def string(self, limit: int = _MAX_HEADER) -> str:
        """The next string; `limit` bytes at most."""
        nbytes = self.take("Q")
        if nbytes > limit:
            raise _error(self.file, f"its header has a name of {nbytes} bytes; at most {limit} are allowed")
        self.need(nbytes)
        raw = self.data[self.at : self.at + nbytes]
        self.at += nbytes
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise _error(self.file, f"its header has a string that is not UTF-8 at byte {self.at - nbytes}") from error

    def value(self, key: str) -> Any:
        """The next typed value of the metadata."""
        kind = self.take("I")
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(key)
        raise _error(self.file, f"metadata {key!r} has type {kind}, which does not exist")

    def array(self, key: str) -> Array:
        """Check the next array and pass over it: nothing here needs the values of one."""
        kind, count, start = self.take("I"), self.take("Q"), self.at
        if kind in _SCALARS:
            self.skip(count * struct.calcsize("<" + _SCALARS[kind]))
        elif kind == _STRING:
            if count > self.size // 8:
                raise _error(self.file, f"metadata {key!r} claims {count} strings, more than the file could hold")
            for _ in range(count):
                self.skip(self.take("Q"))
        else:
            what = "an array of arrays" if kind == _ARRAY else f"an array of type {kind}"
            raise _error(self.file, f"metadata {key!r} is {what}, which GGUF does not have")
        return Array(kind, count, start)


def _read_header(cursor: _Cursor, size: int) -> Header:
    file = cursor.file
    if size < 24 or cursor.take("I") != 0x46554747:
        raise _error(file, f"it is no GGUF file ({size} bytes, and the first 4 are not GGUF)")
    version = cursor.take("I")
    if version not in (2, 3):
        why = "it is big-endian" if version in (2 << 24, 3 << 24) else f"it has GGUF version {version}"
        raise _error(file, f"{why}; versions 2 and 3, little-endian, are read")
    n_tensors, n_values = cursor.take("Q"), cursor.take("Q")
    metadata: dict[str, Any] = {}
    for _ in range(n_values):
        key = cursor.string(_MAX_NAME)
        if key in metadata:
            raise _error(file, f"metadata {key!r} is there twice")
        metadata[key] = cursor.value(key)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise _error(file, f"general.alignment is {shown(alignment)}, expected a power of two")
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(n_tensors):
        name = cursor.string(_MAX_NAME)
        if name in entries:
            raise _error(file, f"tensor {name!r} is there twice", name)
        n_dims = cursor.take("I")
        if n_dims > _MAX_DIMS:
            raise _error(file, f"tensor {name!r} has {n_dims} dimensions; at most {_MAX_DIMS} are allowed", name)
        dims = [cursor.take("Q") for _ in range(n_dims)]
        entries[name] = tuple(reversed(dims)), cursor.take("I"), cursor.take("Q")
    start = -(-cursor.at // alignment) * alignment
    sizes = {int(kind): (kind.name, *sizes) for kind, sizes in gguf_package().GGML_QUANT_SIZES.items()}
    tensors = {name: _check_entry(file, name, entry, sizes, start, alignment, size) for name, entry in entries.items()}
    check_overlap(file, tensors)
    return Header(metadata, tensors)


def _check_entry(
    file: Path,
    name: str,
    entry: tuple[tuple[int, ...], int, int],
    sizes: Mapping[int, tuple[str, int, int]],
    start: int,
    alignment: int,
    file_size: int,
) -> TensorInfo:
    """sizes: number of a type -> its name, weights and bytes of a block."""
    shape, kind, offset = entry
    if kind not in sizes:
        raise _error(file, f"tensor {name!r} has type {kind}, which the installed gguf package does not know", name)
    dtype, block, block_bytes = sizes[kind]
    width = shape[-1] if shape else 1
    if width % block:
        raise _error(file, f"tensor {name!r} is {dtype} {list(shape)}: rows must be multiples of {block}", name)
    nbytes = math.prod(shape) // block * block_bytes
    if offset % alignment:
        raise _error(file, f"tensor {name!r} begins at {offset}, which is not a multiple of {alignment}", name)
    if start + offset + nbytes > file_size:
        raise _error(
            file,
            f"tensor {name!r} ends at byte {start + offset + nbytes} of a file of {file_size}: the file is truncated; "
            "download it again",
            name,
        )
    return TensorInfo(name, dtype, shape, file, start + offset, nbytes)


def _find_parts(file: Path, header: Header) -> list[Path]:
    """All files of the model, in order; the file alone when it is not split."""
    count = header.metadata.get("split.count", 1)
    name = _PART.fullmatch(file.name)
    named = int(name.group(3)) if name else 1
    if type(count) is not int or count != named:
        raise _error(file, f"its name says that it is one of {named} files, its header says one of {shown(count)}")
    if name is None:
        return [file]
    parts = []
    for number in range(1, count + 1):
        part = file.with_name(f"{name.group(1)}-{number:05}-of-{count:05}.gguf")
        if not part.is_file():
            raise CheckpointError(f"{part} is missing: the model is split into {count} files", file=str(part))
        parts.append(part)
    return parts


def _error(file: Path, what: str, tensor: str | None = None) -> CheckpointError:
    return CheckpointError(f"{file}: {what}", file=str(file), tensor=tensor)
