"""What a table of rows promises, wherever it lies."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freetoken.checkpoint.safetensors import DTYPES
from freetoken.errors import ConfigError, FormatError, RowError
from freetoken.formats.codes import bf16_to_fp32

Ids = NDArray[np.int64]
Bytes = NDArray[np.uint8]

SCALE_DTYPES = ("F32", "BF16", "F16")
"""What scales of rows may be; all are exact in fp32."""


class RowTable(ABC):
    """`rows` rows of `row_bytes` bytes, which are numbers of `dtype`, as safetensors calls it; may be used by threads.

    A row's values are its numbers times its scale: `scale` for all, None for 1, or a table of one number a row.
    """

    def __init__(self, name: str, rows: int, row_bytes: int, dtype: str, scale: float | RowTable | None = None) -> None:
        """name: for messages. Raises `ConfigError` and `FormatError` for what cannot be a table."""
        check_shape(rows, row_bytes, dtype)
        if isinstance(scale, RowTable):
            _check_scales(scale, rows)
        elif scale is not None and not (math.isfinite(scale) and scale):
            raise FormatError(f"{name} has the scale {scale}, expected a finite number that is not 0", format=dtype)
        self.name = name
        self.rows = rows
        self.row_bytes = row_bytes
        self.dtype = dtype
        self.scale = scale

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return self.row_bytes // _item_bytes(self.dtype)

    @abstractmethod
    def _fill(self, ids: Ids, out: Bytes) -> None:
        """Write rows of `ids` (n,) into `out` (n * row_bytes,); raises `RowError` before that if one is not there."""

    def close(self) -> None:
        """Give back what the table and its scales hold; a table of files then raises `ClosedError`. May be repeated."""
        if isinstance(self.scale, RowTable):
            self.scale.close()

    def __enter__(self) -> RowTable:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def gather(self, ids: ArrayLike, out: Bytes | None = None) -> Bytes:
        """The rows of `ids`, whole numbers of any shape (...): (..., row_bytes) uint8, in the order of the ids.

        out: C-contiguous memory of that shape to write them to; it is returned. A row that is asked for more than once
        is read once. Raises `RowError` for an id that is not in the table, before anything is read, and
        `CheckpointError` naming file and row where reading fails; `out` may hold anything then.
        """
        wanted = _as_ids(ids)
        shape = (*wanted.shape, self.row_bytes)
        if out is None:
            out = np.empty(shape, np.uint8)
        _check_room(out, shape, np.uint8, "rows")
        self._fill(wanted.reshape(-1), out.reshape(-1))
        return out

    def gather_scales(self, ids: ArrayLike, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """The scales of the rows of `ids` (...): (...) float32. out and errors: as for `gather`.

        Where all rows have the same scale nothing is read, and ids are not looked at.
        """
        wanted = _as_ids(ids)
        if out is None:
            out = np.empty(wanted.shape, np.float32)
        _check_room(out, wanted.shape, np.float32, "scales")
        if not isinstance(self.scale, RowTable):
            out.fill(1.0 if self.scale is None else self.scale)
            return out
        raw = self.scale.gather(wanted).view(DTYPES[self.scale.dtype])[..., 0]
        out[...] = bf16_to_fp32(raw) if self.scale.dtype == "BF16" else raw
        return out

    def stage(self, ids: Ids, out: Bytes, scales: NDArray[np.float32] | None = None) -> Callable[[], None]:
        """A duty of a step: a function that gathers into `out`, and scales into `scales`, when it is called.

        ids: C-contiguous int64 in memory that may be written until then. out, scales: as for `gather`, checked here.
        The duty raises what `gather` raises, and lets go of the GIL while it reads.
        """
        if ids.dtype != np.int64 or not ids.flags.c_contiguous:
            raise ValueError(f"ids are {ids.dtype} with strides {ids.strides}, expected C-contiguous int64")
        _check_room(out, (*ids.shape, self.row_bytes), np.uint8, "rows")
        if scales is not None:
            _check_room(scales, ids.shape, np.float32, "scales")
        return functools.partial(self._gather_both, ids, out, scales)

    def _gather_both(self, ids: Ids, out: Bytes, scales: NDArray[np.float32] | None) -> None:
        self.gather(ids, out)
        if scales is not None:
            self.gather_scales(ids, scales)

    def no_row(self, row: int, place: int) -> RowError:
        """What to raise for an id that is not in the table."""
        return RowError(
            f"{self.name} has rows 0 to {self.rows - 1}; id {place} of those asked for is {row}: nothing was read",
            row=row,
            rows=self.rows,
        )


def _item_bytes(dtype: str) -> int:
    return int(np.dtype(DTYPES[dtype]).itemsize)


def _as_ids(ids: ArrayLike) -> Ids:
    found = np.asarray(ids)
    if found.size and found.dtype.kind not in "iu":
        raise TypeError(f"ids are {found.dtype}, expected whole numbers")
    if found.dtype == np.uint64:  # what is too large would become negative, and be named so
        found = np.minimum(found, np.uint64(np.iinfo(np.int64).max))
    return np.ascontiguousarray(found, np.int64).reshape(found.shape)


def _check_room(out: NDArray[Any], shape: tuple[int, ...], dtype: type[Any], what: str) -> None:
    if out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous or not out.flags.writeable:
        kind = "C-contiguous" if out.flags.c_contiguous else "strided"
        kind += "" if out.flags.writeable else " and read-only"
        raise ValueError(
            f"out for {what} is {out.dtype} {out.shape}, {kind}; expected {np.dtype(dtype)} {shape}, C-contiguous and "
            "writeable"
        )


def check_shape(rows: int, row_bytes: int, dtype: str) -> None:
    """Raise `ConfigError` unless there can be such a table."""
    if dtype not in DTYPES:
        expected = ", ".join(DTYPES)
        raise ConfigError(
            f"rows of dtype {dtype!r} are not known: choose one of {expected}",
            name="dtype",
            value=dtype,
            expected=expected,
        )
    item = _item_bytes(dtype)
    for name, value, unit in (("row_bytes", row_bytes, item), ("rows", rows, 1)):
        if value <= 0 or value % unit or value >= 2**62 // (row_bytes if name == "rows" else 1):
            raise ConfigError(
                f"a table of {rows} rows of {row_bytes} bytes of {dtype} cannot be: {name} must be a positive multiple "
                f"of {unit}, and all bytes fewer than 2**62",
                name=name,
                value=value,
                expected=f"a positive multiple of {unit}",
            )


def _check_scales(scales: RowTable, rows: int) -> None:
    if scales.dtype not in SCALE_DTYPES or scales.width != 1 or scales.rows != rows:
        raise FormatError(
            f"{scales.name} has {scales.rows} rows of {scales.width} {scales.dtype}, expected one number for each of "
            f"{rows} rows, of {', '.join(SCALE_DTYPES)}",
            format=scales.dtype,
            shape=(scales.rows, scales.width),
        )
