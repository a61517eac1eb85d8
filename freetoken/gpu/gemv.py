"""Decode: the routes of units, one after the other, in float32. The plain version, for every GPU that Triton serves.

A program has one tile of gate and the one of up beside it, or one of down, for one unit, and goes along K with LINE_STEP lines
at a time: 16 lanes of a line are one load of 64 bytes. A unit's second route reads what its first one left in the cache.
Weights are exact in every format.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.executor import Activation
from freetoken.formats.record import RecordLayout
from freetoken.gpu.tiles import activate, check, constants, load_bias, load_dwords, load_factor, load_scales, spread_scales
from freetoken.gpu import units
from freetoken.gpu.units import Units

COLUMNS = tl.constexpr(units.COLUMNS)
_SHAPE = {"LINE_STEP": 32, "num_warps": 2}


class TritonGemv:
    """Both products of one shard's experts for the routes of units. Holds no tensor."""

    def __init__(self, layout: RecordLayout, activation: Activation, device: torch.device | None = None) -> None:
        self.layout = layout
        self._gate_up = constants(layout, "gate_up")
        self._down = constants(layout, "down")
        self._activation = {"KIND": activation.kind, "ALPHA": activation.alpha, "LIMIT": activation.limit}

    def gate_up(self, x: torch.Tensor, units: Units, k: int, out: torch.Tensor, offset: int = 0) -> None:
        """Write the hidden values of each route of `units` to its row of `out`, and no other row.

        x: (B, H) float32, bf16 or fp16. k: routes of a token; route r is of token r // k. out: (B * k, I) float32,
        after biases, globals and activation. offset: bytes from a unit's address to this shard's record.
        """
        check(x, "x", self.layout.hidden)
        check(out, "out", self.layout.intermediate, torch.float32)
        grid = (len(units.address) * self.layout.gate_tiles,)
        how = {**self._gate_up, **self._activation, **_SHAPE}
        gate_up[grid](x, units.address, units.route, out, k, offset, **how)

    def down(self, h: torch.Tensor, units: Units, out: torch.Tensor, offset: int = 0) -> None:
        """Write the output of each route of `units` to its row of `out`: bias and global applied, unweighted.

        h: (B * k, I) float32, as `gate_up` wrote it. out: (B * k, H) float32.
        """
        check(h, "h", self.layout.intermediate, torch.float32)
        check(out, "out", self.layout.hidden, torch.float32)
        grid = (len(units.address) * self.layout.down_tiles,)
        down[grid](h, units.address, units.route, out, offset, **self._down, **_SHAPE)


@triton.jit
def row_sums(
    matrix,
    first,
    x,
    DECODE: tl.constexpr,
    SCALE: tl.constexpr,
    POSITIONS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_LINES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    LINE_STEP: tl.constexpr,
):
    """(ROWS,) float32: the rows of the tiles from `first` on times the vector at x."""
    tl.static_assert(LINE_STEP % BLOCK_LINES == 0 or BLOCK_LINES % LINE_STEP == 0)
    blocks: tl.constexpr = max(LINE_STEP // BLOCK_LINES, 1)
    within = tl.arange(0, ROWS)
    tile = first + within // 16
    lane = within % 16
    rows = (within >= 0)[None, :]
    sums = tl.zeros((LINE_STEP, ROWS), tl.float32)
    for at in range(0, LINES, LINE_STEP):
        line = at + tl.arange(0, LINE_STEP)
        there = (line < LINES)[:, None] & rows
        dwords = load_dwords(matrix, tile, lane, line, there, BLOCK_LINES, SCALE_BYTES, TILE)
        part = tl.zeros((LINE_STEP, ROWS), tl.float32)
        for i in tl.static_range(POSITIONS):
            values = tl.load(x + line * POSITIONS + i, mask=line < LINES, other=0.0).to(tl.float32)
            part += DECODE(dwords, i) * values[:, None]
        if SCALE_BYTES > 0:
            block = at // BLOCK_LINES + tl.arange(0, blocks)
            there = (block * BLOCK_LINES < LINES)[:, None] & rows
            bits = load_scales(matrix, tile, lane, block, there, BLOCK_LINES, SCALE_BYTES, TILE)
            part *= spread_scales(SCALE(bits), LINE_STEP // blocks)
        sums += part
    return tl.sum(sums, 0)


@triton.jit
def gate_up(
    x,
    address,
    route,
    out,
    k,
    offset,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    N: tl.constexpr,
    DECODE: tl.constexpr,
    SCALE: tl.constexpr,
    FACTOR: tl.constexpr,
    FOLDED: tl.constexpr,
    POSITIONS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_LINES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    TILE: tl.constexpr,
    MATRIX: tl.constexpr,
    GLOBALS: tl.constexpr,
    BIAS: tl.constexpr,
    LINE_STEP: tl.constexpr,
):
    """A tile of gate and of up, for one unit."""
    tiles: tl.constexpr = (N + 15) // 16
    unit = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    record = tl.load(address + unit)
    if record == 0:
        return
    record = tl.multiple_of(record + offset, 64)
    matrix = (record + MATRIX).to(tl.pointer_type(tl.int32))
    row = tile * 16 + tl.arange(0, 16)
    for column in range(COLUMNS):
        here = tl.load(route + unit * COLUMNS + column).to(tl.int64)
        if here >= 0:
            of_token = x + here // k * (LINES * POSITIONS)
            sums = row_sums(
                matrix,
                2 * tile,
                of_token,
                DECODE,
                SCALE,
                POSITIONS,
                LINES,
                BLOCK_LINES,
                SCALE_BYTES,
                TILE,
                32,
                LINE_STEP,
            )
            gate, up = tl.split(sums.reshape(2, 16).permute(1, 0))
            gate = gate * load_factor(record, 0, GLOBALS, FACTOR) + load_bias(record, 0, row, BIAS, N)
            up = up * load_factor(record, 1, GLOBALS, FACTOR) + load_bias(record, 1, row, BIAS, N)
            tl.store(out + here * N + row, activate(gate, up, KIND, ALPHA, LIMIT), mask=row < N)


@triton.jit
def down(
    h,
    address,
    route,
    out,
    offset,
    N: tl.constexpr,
    DECODE: tl.constexpr,
    SCALE: tl.constexpr,
    FACTOR: tl.constexpr,
    FOLDED: tl.constexpr,
    POSITIONS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_LINES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    TILE: tl.constexpr,
    MATRIX: tl.constexpr,
    GLOBALS: tl.constexpr,
    BIAS: tl.constexpr,
    LINE_STEP: tl.constexpr,
):
    """A tile of down, for one unit."""
    tiles: tl.constexpr = (N + 15) // 16
    unit = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    record = tl.load(address + unit)
    if record == 0:
        return
    record = tl.multiple_of(record + offset, 64)
    matrix = (record + MATRIX).to(tl.pointer_type(tl.int32))
    row = tile * 16 + tl.arange(0, 16)
    for column in range(COLUMNS):
        here = tl.load(route + unit * COLUMNS + column).to(tl.int64)
        if here >= 0:
            of_route = h + here * (LINES * POSITIONS)
            sums = row_sums(
                matrix,
                tile,
                of_route,
                DECODE,
                SCALE,
                POSITIONS,
                LINES,
                BLOCK_LINES,
                SCALE_BYTES,
                TILE,
                16,
                LINE_STEP,
            )
            sums = sums * load_factor(record, 0, GLOBALS, FACTOR) + load_bias(record, 0, row, BIAS, N)
            tl.store(out + here * N + row, sums, mask=row < N)
