"""Experts whose bytes only have to be permuted, from their files into records without a copy between.

A loader that reads an expert into NumPy arrays and packs these does the work of one that writes tiles as it reads, and
more: so `stored` experts, those in the format they will be held in, are written here, and only what cannot be is read
and packed (`load.write_records`). Both give the same bytes. `_strips.pyx` does the work, without the GIL.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint._strips import ENDED, Reader, window_bytes
from freetoken.checkpoint.safetensors import TensorInfo, read_error
from freetoken.errors import CheckpointError
from freetoken.formats.base import TILE_ROWS, Format, Scales
from freetoken.formats.record import Biases, RecordLayout, shard_biases

BATCH_BYTES = 16 << 20
"""Bytes of records that are written at once, so that threads seldom wait for the interpreter between two calls."""


@dataclass(frozen=True)
class StoredRows:
    """One matrix, row by row in a file, or two whose rows alternate.

    matrix: "gate", "up" or "down", or "gate_up" for the two. offset: of the first row's codes in the file of `codes`.
    Scales are in a tensor of their own from `scales_offset` on, or as `values` (rows, blocks) in memory; where a format
    has some and both are None, each lies right before its block's codes. halves: 4-bit codes as ggml packs them, byte j
    holding weights j and j + 16 of a block of 32.
    """

    matrix: str
    codes: TensorInfo
    offset: int
    scales: TensorInfo | None = None
    scales_offset: int = 0
    values: Scales | None = None
    halves: bool = False


@dataclass(frozen=True)
class StoredExpert:
    """One expert in the bytes of a format, of which nothing is read yet but what is small."""

    rows: tuple[StoredRows, ...]
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)
    divides: bool = False
    biases: Biases = (None, None, None)


class Rows(NamedTuple):
    """Rows for `_strips`: of a file, of `memory` or, with neither, where the codes are.

    offset: where the first begins. at: where in a row those bytes begin that are wanted.
    """

    path: bytes | None
    memory: NDArray[np.uint8] | None
    offset: int
    row_bytes: int
    at: int


class Piece(NamedTuple):
    """What becomes tiles, for `_strips`. tiling: the fields of `ft_tiling` in tiling.h, in their order.

    rows: of all `step` matrices together, whose rows alternate. out: offset of the first tile in the record.
    out_bytes: from there to the end of the last tile. tile_step: from one tile to the next.
    """

    codes: Rows
    scales: Rows
    tiling: tuple[int, ...]
    rows: int
    step: int
    out: int
    out_bytes: int
    tile_step: int


def write_stored(
    experts: Sequence[StoredExpert], whole: RecordLayout, layout: RecordLayout, start: int, out: NDArray[np.uint8]
) -> bool:
    """Write experts of layout `whole`, or their shards of intermediate rows [start, start + layout.intermediate).

    out: (len(experts), layout.nbytes) uint8, of which every byte is set. False: something in them looks like no number,
    and the records must not be used; reading them in the plain way tells what. Raises `CheckpointError` naming file and
    tensor where a file ends or fails.
    """
    fmt, stop = whole.format, start + layout.intermediate
    if any(fmt.find_bad_global(factor, expert.divides) for expert in experts for factor in set(expert.factors)):
        return False
    parts = [(part, number * layout.nbytes) for number, expert in enumerate(experts) for part in expert.rows]
    parts.sort(key=_place)
    pieces = [_piece(part, whole, layout, start, at) for part, at in parts]
    failed, error, of_scales, suspicious = _reader().write(pieces, out.reshape(-1))
    if failed >= 0:
        part = parts[failed][0]
        info = part.scales if of_scales else part.codes
        assert info is not None
        raise _read_error(info, error)
    if suspicious:
        return False
    for expert, record in zip(experts, out, strict=True):
        biases = shard_biases(expert.biases, start, stop)
        layout.pack_rest(record, expert.factors, (expert.divides, expert.divides), biases)
    return True


def _place(item: tuple[StoredRows, int]) -> tuple[Path, int]:
    return item[0].codes.file, item[0].offset


def look_alarming(infos: Sequence[TensorInfo], fmt: Format) -> bool:
    """Whether a byte of these tensors, the scales of a format that has them of one byte, has the bits of an alarm.

    Raises `CheckpointError` naming file and tensor where a file ends or fails.
    """
    assert fmt.scale_bytes == 1 and fmt.keeps_scales
    found = False
    for file, tensors in groupby(sorted(infos, key=_in_file), key=attrgetter("file")):
        spans: list[tuple[int, int]] = []
        first: list[TensorInfo] = []
        for info in tensors:
            if spans and spans[-1][1] == info.offset:
                spans[-1] = spans[-1][0], info.offset + info.nbytes
            else:
                spans.append((info.offset, info.offset + info.nbytes))
                first.append(info)
        failed, error, alarming = _reader().has_byte(os.fsencode(file), spans, fmt.scale_alarms)
        if failed >= 0:
            raise _read_error(first[failed], error)
        found |= alarming
    return found


def _in_file(info: TensorInfo) -> tuple[Path, int]:
    return info.file, info.offset


def _read_error(info: TensorInfo, error: int) -> CheckpointError:
    return read_error(info, None if error == ENDED else OSError(error, os.strerror(error)))


def working_bytes(layout: RecordLayout) -> int:
    """What a thread takes to write experts of a layout: its windows, and scales that are not taken as they lie."""
    widest = max(layout.hidden, layout.intermediate)
    row = widest * layout.format.bits // 8 + layout.format.n_blocks(widest) * layout.format.scale_bytes
    scales = 0 if layout.format.keeps_scales else (BATCH_BYTES + layout.nbytes) * 4 // layout.format.block
    return 2 * window_bytes(2 * TILE_ROWS * row) + scales


_threads = threading.local()


def _reader() -> Reader:
    """This thread's."""
    if not hasattr(_threads, "reader"):
        _threads.reader = Reader()
    reader: Reader = _threads.reader
    return reader


@dataclass(frozen=True)
class _Shape:
    """What all experts of a layer have in common of a `Piece`: its numbers, and those of its rows."""

    first: int
    rows: int
    step: int
    row_bytes: int
    at: int
    scale_row_bytes: int
    scale_at: int
    inline: bool
    tiling: tuple[int, ...]
    out: int
    out_bytes: int
    tile_step: int


@lru_cache(maxsize=64)
def _shape(matrix: str, inline: bool, halves: bool, whole: RecordLayout, layout: RecordLayout, start: int) -> _Shape:
    """inline: scales lie between the codes, where the format has any."""
    fmt, is_down = whole.format, matrix == "down"
    width_in, wanted, skip = (
        (whole.intermediate, layout.intermediate, start) if is_down else (whole.hidden, whole.hidden, 0)
    )
    step = 2 if matrix == "gate_up" else 1
    tile = fmt.tile_bytes(wanted)
    out, out_bytes = layout.sections["down" if is_down else "gate_up"]
    if matrix in ("gate", "up"):  # every second tile
        out, out_bytes = out + (tile if matrix == "up" else 0), out_bytes - tile
    codes, scale = wanted * fmt.bits // 8, fmt.scale_bytes
    scale_inline = scale if inline else 0
    block_codes = fmt.block * fmt.bits // 8 if scale else codes
    block_step = block_codes + scale_inline
    blocks = fmt.n_blocks(width_in)
    row_bytes = width_in * fmt.bits // 8 + blocks * scale_inline
    skipped = skip * fmt.bits // 8 + skip // fmt.block * scale_inline
    alarms = (*fmt.scale_alarms, 0, 0)[:2]
    return _Shape(
        first=0 if is_down else start * step,
        rows=whole.hidden if is_down else layout.intermediate * step,
        step=step,
        row_bytes=row_bytes,
        at=skipped + scale_inline,
        scale_row_bytes=row_bytes if inline else blocks * scale,
        scale_at=skipped if inline else skip // fmt.block * scale,
        inline=inline,
        tiling=(
            codes, block_codes, block_step, scale, block_step if inline else scale, int(halves),
            fmt.bits // 8 if fmt.code_alarm else 0, fmt.code_alarm, *alarms,
        ),
        out=out,
        out_bytes=out_bytes,
        tile_step=2 * tile if matrix in ("gate", "up") else tile,
    )  # fmt: skip


_path_bytes = lru_cache(maxsize=64)(os.fsencode)


def _piece(part: StoredRows, whole: RecordLayout, layout: RecordLayout, start: int, out: int) -> Piece:
    """out: where the record begins."""
    inline = part.scales is None and part.values is None
    shape = _shape(part.matrix, inline, part.halves, whole, layout, start)
    first = shape.first * shape.row_bytes
    codes = Rows(_path_bytes(part.codes.file), None, part.offset + first, shape.row_bytes, shape.at)
    scale_first = shape.first * shape.scale_row_bytes
    if inline:
        scales = Rows(None, None, 0, shape.row_bytes, shape.scale_at)
    elif part.scales is not None:
        path, offset = _path_bytes(part.scales.file), part.scales_offset + scale_first
        scales = Rows(path, None, offset, shape.scale_row_bytes, shape.scale_at)
    else:
        memory = np.ascontiguousarray(part.values).view(np.uint8).reshape(-1)
        scales = Rows(None, memory, scale_first, shape.scale_row_bytes, shape.scale_at)
    return Piece(codes, scales, shape.tiling, shape.rows, shape.step, out + shape.out, shape.out_bytes, shape.tile_step)
