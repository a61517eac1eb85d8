"""A table whose rows stay in the files they came in and are read when they are wanted.

`_reader.pyx` reads; this opens files, finds out what reads they take, and says in words what went wrong and once, in
the log, how it reads. Rows are read past the page cache: a few hundred bytes of each page would be of use there.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from freetoken.checkpoint.safetensors import DTYPES, TensorInfo
from freetoken.errors import CheckpointError, ClosedError, ConfigError, FormatError, FreeTokenError, UnsupportedError
from freetoken.formats.codes import bf16_to_fp32
from freetoken.rows import _reader
from freetoken.rows.base import SCALE_DTYPES, Bytes, Ids, RowTable, check_shape
from freetoken.rows.places import Place, RowFile, SafetensorsRows, check_total, place_files, place_tensors

logger = logging.getLogger(__name__)

Change = Callable[[str, bool, int, int, int], int]

DEPTH = 256
"""Reads in flight: of 1, 16, 64 and 256, the last gives most (`benchmarks/bench_rows.py`)."""
SLOT_BYTES = 32 << 10
"""Of a read, at the most, if a row is not longer."""
SLOTS_BYTES = 32 << 20
"""Of all reads in flight: a longer row leaves room for fewer."""
MAX_ROW_BYTES = 8 << 20
MAX_ALIGN = 64 << 10
PAGE = 4096


class DiskRowTable(RowTable):
    """Rows that lie in files. From several threads calls take turns: one has enough in flight to keep a drive busy.

    Besides the ids and the rows of a call it holds at most 64 MiB, however large the table is and however many ids
    there are.
    """

    def __init__(
        self,
        name: str,
        places: Sequence[Place],
        rows: int,
        row_bytes: int,
        dtype: str,
        scale: float | RowTable | None = None,
        *,
        depth: int = DEPTH,
        change: Change | None = None,
    ) -> None:
        """places: whose bytes, one after the other, are the rows. Use `open`. change: as for `_reader.Reader`."""
        super().__init__(name, rows, row_bytes, dtype, scale)
        check_total(name, places, rows, row_bytes)
        if row_bytes > MAX_ROW_BYTES:
            raise UnsupportedError(
                f"{name} has rows of {row_bytes} bytes; tables of rows of at most {MAX_ROW_BYTES} are read from disk",
                feature="row_bytes",
                available=str(MAX_ROW_BYTES),
            )
        if not 1 <= depth <= 4096:
            raise ConfigError(
                f"depth={depth} is not from 1 to 4096: choose how many reads are in flight",
                name="depth",
                value=depth,
                expected="1 to 4096",
            )
        self._paths = list(dict.fromkeys(place.file for place in places if place.nbytes))
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._told = ""
        self._plain_because = ""
        self._reader: _reader.Reader | None = self._make_reader(places, depth, change)

    @classmethod
    def open(
        cls,
        source: SafetensorsRows | Sequence[RowFile],
        rows: int,
        row_bytes: int,
        dtype: str,
        scale: float | str | RowTable | None = None,
        *,
        cut: bool = False,
        depth: int = DEPTH,
        change: Change | None = None,
    ) -> DiskRowTable:
        """A table of `rows` rows of `row_bytes` bytes of `dtype` (safetensors' word), numbered through its shards.

        scale: of all rows, a table of one number a row, or the name of a tensor beside the rows that holds either, with
        `{i}` if it lies in shards as well. cut: a row may begin in one file and end in the next. depth: reads in
        flight. Raises `CheckpointError` naming file and tensor where a size, a shape or a dtype is not that.
        """
        check_shape(rows, row_bytes, dtype)
        if isinstance(source, SafetensorsRows):
            name, places = source.name, place_tensors(source.find(), row_bytes, dtype)
        else:
            name = str(source[0].file) if source else "a table without files"
            places = place_files(source, row_bytes, cut)
        if isinstance(scale, str):
            if not isinstance(source, SafetensorsRows):
                raise ConfigError(
                    f"scale={scale!r} names a tensor, and rows in plain files have none beside them: pass a number or "
                    "a table",
                    name="scale",
                    value=scale,
                    expected="a number or a table",
                )
            scale = open_scale(source.beside(scale), rows, depth)
        return cls(name, places, rows, row_bytes, dtype, scale, depth=depth, change=change)

    @property
    def reading(self) -> str:
        """How rows are read and, where it is not by io_uring and directly, why. Raises `ClosedError`."""
        return self._describe(self._open_reader())[0]

    @property
    def held_bytes(self) -> int:
        """Bytes that reads and the sorting of ids have come to hold, or may. Raises `ClosedError`."""
        return self._open_reader().held_bytes

    def close(self) -> None:
        """Close the files, and the scales of the rows. A reading that goes on in another thread is broken off first."""
        reader = self._reader
        if os.getpid() != self._pid:  # the lock may be held by a thread that is not here
            self._reader = None
        elif reader is not None:
            reader.stop()
            with self._lock:
                self._reader = None
        super().close()

    def _fill(self, ids: Ids, out: Bytes) -> None:
        self._open_reader()
        with self._lock:
            reader = self._open_reader()
            failed = reader.gather(ids, out)
            self._tell(reader)
        if failed:
            raise self._error(*failed)

    def _open_reader(self) -> _reader.Reader:
        if os.getpid() != self._pid:
            raise UnsupportedError(
                f"{self.name} was opened before a fork and cannot be read in the child; open it there", feature="fork"
            )
        if self._reader is None:
            raise self._closed()
        return self._reader

    def _closed(self) -> ClosedError:
        return ClosedError(f"{self.name} was closed: open it again to read its rows", what=self.name)

    def _error(self, kind: int, error: int, file: int, row: int, found: int, expected: int) -> FreeTokenError:
        """What to raise for an answer of `Reader.gather`."""
        if kind == _reader.BAD_ID:
            return self.no_row(row, found)
        if kind == _reader.STOPPED:
            return self._closed()
        if kind == _reader.CHANGED:
            return FreeTokenError(
                f"{self.name}: of {expected} ids, {found} were still there when they were read: others wrote to them"
            )
        path = self._paths[file]
        if kind == _reader.ENDED:
            what = f"the file has {found} bytes now, expected at least {expected}; it changed or is truncated"
        else:
            what = f"{os.strerror(error)}, at byte {found}; expected to read up to byte {expected - 1}"
        return CheckpointError(f"{path}: row {row} of {self.name} cannot be read: {what}", file=str(path), row=row)

    def _make_reader(self, places: Sequence[Place], depth: int, change: Change | None) -> _reader.Reader:
        numbers = {path: number for number, path in enumerate(self._paths)}
        files: list[tuple[bytes, int, int]] = []
        parts, first = [], 0
        try:
            for path in self._paths:
                fd, align, why = open_rows(path)
                files.append((os.fsencode(path), fd, align))
                self._plain_because = self._plain_because or why
                _check_size(path, fd, [place for place in places if place.file == path])
            for place in places:
                if place.nbytes:
                    parts.append((numbers[place.file], first, first + place.nbytes, place.offset))
                    first += place.nbytes
            align = max([PAGE, *(align for _, _, align in files)])
            slot = (-(-max(SLOT_BYTES, self.row_bytes) // align) + 2) * align
            fits = min(depth, SLOTS_BYTES // slot)
            return _reader.Reader(files, parts, self.rows, self.row_bytes, fits, slot, align, change)
        except BaseException:
            for _, fd, _ in files:
                os.close(fd)
            raise

    def _describe(self, reader: _reader.Reader) -> tuple[str, bool]:
        """How it reads, and whether that is as well as can be."""
        how, as_wished = "by io_uring", True
        if reader.ring_error:
            how = f"by threads, because io_uring was refused ({os.strerror(reader.ring_error)})"
            as_wished = False
        why = self._plain_because
        if reader.direct_error:
            why = os.strerror(reader.direct_error)
        if why:
            return f"{how}, through the page cache, because direct reads were refused ({why})", False
        return f"{how}, directly", as_wished

    def _tell(self, reader: _reader.Reader) -> None:
        """One line in the log, when the first rows were read: until then anything may be refused."""
        text, as_wished = self._describe(reader)
        if text != self._told:
            self._told = text
            logger.log(logging.INFO if as_wished else logging.WARNING, "rows of %s are read %s", self.name, text)


def open_scale(source: SafetensorsRows, rows: int, depth: int) -> float | RowTable:
    """The scale of a table of so many rows that tensors hold: one number, or a table of one a row."""
    infos = source.find()
    dtype = infos[0].dtype
    if dtype not in SCALE_DTYPES:
        raise FormatError(
            f"{infos[0].file}: scale {infos[0].name!r} is {dtype}, expected one of {', '.join(SCALE_DTYPES)}",
            format=dtype,
            shape=infos[0].shape,
        )
    item = np.dtype(DTYPES[dtype]).itemsize
    if len(infos) == 1 and infos[0].nbytes == item and rows != 1:
        return _read_number(infos[0])
    return DiskRowTable(source.name, place_tensors(infos, item, dtype), rows, item, dtype, depth=depth)


def _read_number(info: TensorInfo) -> float:
    raw = np.fromfile(info.file, DTYPES[info.dtype], 1, offset=info.offset)
    return float((bf16_to_fp32(raw) if info.dtype == "BF16" else raw)[0])


def open_rows(path: Path) -> tuple[int, int, str]:
    """(descriptor, alignment, why not) of a file for direct reads, or for plain ones, whose alignment is 1.

    Raises `CheckpointError` where it cannot be opened at all.
    """
    direct = getattr(os, "O_DIRECT", 0)
    why = "this system has none" if not direct else ""
    if direct:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | direct)
        except OSError as error:
            why = str(error.strerror)
        else:
            align = find_align(fd)
            if align:
                return fd, align, ""
            os.close(fd)
            why = f"this file system takes none of {PAGE} bytes"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", file=str(path)) from error
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd, 1, why


def find_align(fd: int) -> int:
    """What direct reads of an open file must be aligned to, 0 if it takes none: told by the kernel, or tried."""
    told = _reader.direct_align(fd)
    if told >= 0:
        return told if told <= MAX_ALIGN else 0
    memory = mmap.mmap(-1, PAGE)
    for align in (512, PAGE):
        try:
            with memoryview(memory)[:align] as view:
                os.preadv(fd, [view], 0)
        except OSError:
            continue
        return align
    return 0


def _check_size(path: Path, fd: int, places: Sequence[Place]) -> None:
    size, end = os.fstat(fd).st_size, max(place.offset + place.nbytes for place in places)
    if end > size:
        raise CheckpointError(
            f"{path} has {size} bytes, expected {end}: it changed while it was opened", file=str(path)
        )
