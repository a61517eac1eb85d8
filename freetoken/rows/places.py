"""In which bytes of which files the rows of a table lie; every size is compared with its header or its file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from freetoken.checkpoint.safetensors import TensorInfo, open_checkpoint, open_file, read_header
from freetoken.errors import CheckpointError

NUMBER = "{i}"
"""What stands in a spelling for the number of a shard."""


class Place(NamedTuple):
    """A run of a table's bytes: `nbytes` from `offset` on of a file."""

    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class RowFile:
    """Rows in a file as it is: from byte `offset` on, `nbytes` of them, or all there are."""

    file: str | os.PathLike[str]
    offset: int = 0
    nbytes: int | None = None

    def find(self) -> Place:
        """Raises `CheckpointError` where the file cannot be read or is shorter than that."""
        file = Path(self.file)
        with open_file(file) as (_, size):
            nbytes = size - self.offset if self.nbytes is None else self.nbytes
        if self.offset < 0 or nbytes < 0 or self.offset + nbytes > size:
            wanted = "the rest" if self.nbytes is None else f"{self.nbytes} bytes"
            raise CheckpointError(
                f"{file} has {size} bytes, expected {wanted} from byte {self.offset} on: is it the right one?",
                file=str(file),
            )
        return Place(file, self.offset, nbytes)


@dataclass(frozen=True)
class SafetensorsRows:
    """Rows in tensors of safetensors files: one, or several that follow each other, numbered from 0 on.

    tensors: by name, as their headers say. name: of the tensor, or with `{i}` for the numbers of several.
    """

    tensors: Mapping[str, TensorInfo]
    name: str

    @classmethod
    def of(cls, path: str | os.PathLike[str], name: str) -> SafetensorsRows:
        """From the headers of a file, or of a checkpoint's folder."""
        return cls(open_checkpoint(path).tensors if os.path.isdir(path) else read_header(Path(path)), name)

    def beside(self, name: str) -> SafetensorsRows:
        """Other tensors of the same files."""
        return SafetensorsRows(self.tensors, name)

    def find(self) -> list[TensorInfo]:
        """The tensors in their order; raises `CheckpointError` naming the first that is missing."""
        if NUMBER not in self.name:
            return [self._get(self.name)]
        before, after = self.name.split(NUMBER, 1)
        spelled = re.compile(re.escape(before) + "(0|[1-9][0-9]{0,8})" + re.escape(after))
        found = [int(match[1]) for match in map(spelled.fullmatch, self.tensors) if match]
        return [self._get(f"{before}{number}{after}") for number in range(max(found, default=0) + 1)]

    def _get(self, name: str) -> TensorInfo:
        try:
            return self.tensors[name]
        except KeyError:
            alike = [known for known in self.tensors if known.rpartition(".")[2] == name.rpartition(".")[2]]
            raise CheckpointError(
                f"tensor {name!r} is missing; the files have {len(self.tensors)} tensors, of which "
                f"{', '.join(map(repr, alike[:3])) or 'none'} end alike",
                tensor=name,
            ) from None


def place_tensors(infos: Sequence[TensorInfo], row_bytes: int, dtype: str) -> list[Place]:
    """Where tensors of whole rows lie; raises `CheckpointError` where one has another dtype or width."""
    for info in infos:
        rows = info.shape[0] if info.shape else 1
        if info.dtype != dtype or rows * row_bytes != info.nbytes:
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r} is {info.dtype} {list(info.shape)}, expected rows of {row_bytes} "
                f"bytes of {dtype}",
                file=str(info.file),
                tensor=info.name,
            )
    return [Place(info.file, info.offset, info.nbytes) for info in infos]


def place_files(files: Sequence[RowFile], row_bytes: int, cut: bool) -> list[Place]:
    """Where files as they are lie; raises `CheckpointError` where one ends inside a row, unless `cut`."""
    places = [file.find() for file in files]
    for place in places:
        if place.nbytes % row_bytes and not cut:
            raise CheckpointError(
                f"{place.file} has {place.nbytes} bytes of rows, expected whole rows of {row_bytes}: pass cut=True if "
                "rows go on in the next file",
                file=str(place.file),
            )
    return places


def check_total(name: str, places: Sequence[Place], rows: int, row_bytes: int) -> None:
    """Raise `CheckpointError` unless places hold so many rows."""
    found = sum(place.nbytes for place in places)
    if found != rows * row_bytes:
        raise CheckpointError(
            f"{name} has {found} bytes in {len(places)} part(s), which is {found / row_bytes:.6g} rows of {row_bytes}; "
            f"expected {rows} rows, {rows * row_bytes} bytes: is a part missing, or the number of rows wrong?",
            file=str(places[0].file) if places else None,
        )
