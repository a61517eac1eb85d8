"""Decode: the routes of units, one after the other, in float32. The plain version, for every GPU that Triton serves.

A program has one tile of gate and the one of up beside it, or one of down, for one unit, and goes along K some lines
at a time: 16 lanes of a line are one load of 64 bytes. A unit's second route reads what its first one left in the
cache. Weights are exact in every format.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.executor import Activation
from freetoken.formats.record import RecordLayout
from freetoken.gpu import units
from freetoken.gpu.tiles import Section, activate, check, finish, load_dwords, load_scales, spread_scales

COLUMNS = tl.constexpr(units.COLUMNS)
_SHAPE = {"LINE_STEP": 64, "num_warps": 2}
"""The best of 9 on an H200 for one and four tokens, mxfp4 of 2880/2880 and nvfp4 of 2048/768 taken together."""


class TritonGemv:
    """Both products of one shard's experts for the routes of units. Holds no tensor."""

    def __init__(self, layout: RecordLayout, activation: Activation, device: torch.device | None = None) -> None:
        self.layout = layout
        self.activation = activation
        self._gate_up = Section.of(layout, "gate_up")
        self._down = Section.of(layout, "down")

    def gate_up(
        self, x: torch.Tensor, work: units.Units, k: int, out: torch.Tensor, offset: int = 0, early: bool = False
    ) -> None:
        """Write the hidden values of each route of `work` to its row of `out`, and no other row.

        x: (B, H) float32, bf16 or fp16. k: routes of a token; route r is of token r // k. out: (B * k, I) float32,
        after biases, globals and activation. offset: bytes from a unit's address to this shard's record. early: is for
        `CudaGemv`.
        """
        check(x, "x", self.layout.hidden)
        check(out, "out", self.layout.intermediate, torch.float32)
        grid = (len(work.address) * self.layout.gate_tiles,)
        gate_up[grid](x, work.address, work.route, out, k, offset, self._gate_up, self.activation, **_SHAPE)

    def down(self, h: torch.Tensor, work: units.Units, out: torch.Tensor, offset: int = 0) -> None:
        """Write the output of each route of `work` to its row of `out`: bias and global applied, unweighted.

        h: (B * k, I) float32, as `gate_up` wrote it. out: (B * k, H) float32.
        """
        check(h, "h", self.layout.intermediate, torch.float32)
        check(out, "out", self.layout.hidden, torch.float32)
        grid = (len(work.address) * self.layout.down_tiles,)
        down[grid](h, work.address, work.route, out, offset, self._down, **_SHAPE)


@triton.jit
def row_sums(record, section: tl.constexpr, first, x, ROWS: tl.constexpr, LINE_STEP: tl.constexpr):
    """(ROWS,) float32: the rows of the tiles from `first` on times the vector at x."""
    positions: tl.constexpr = section.positions
    block_lines: tl.constexpr = section.block_lines
    tl.static_assert(LINE_STEP % block_lines == 0 or block_lines % LINE_STEP == 0)
    blocks: tl.constexpr = max(LINE_STEP // block_lines, 1)
    within = tl.arange(0, ROWS)
    tile = first + within // 16
    lane = within % 16
    rows = (within >= 0)[None, :]
    sums = tl.zeros((LINE_STEP, ROWS), tl.float32)
    for at in range(0, section.lines, LINE_STEP):
        line = at + tl.arange(0, LINE_STEP)
        dwords = load_dwords(record, section, tile, lane, line, (line < section.lines)[:, None] & rows)
        part = tl.zeros((LINE_STEP, ROWS), tl.float32)
        for i in tl.static_range(positions):
            values = tl.load(x + line * positions + i, mask=line < section.lines, other=0.0)
            part += section.decode(dwords, i) * values.to(tl.float32)[:, None]
        if section.scale_bytes > 0:
            block = at // block_lines + tl.arange(0, blocks)
            there = (block * block_lines < section.lines)[:, None] & rows
            part *= spread_scales(load_scales(record, section, tile, lane, block, there), LINE_STEP // blocks)
        sums += part
    return tl.sum(sums, 0)


@triton.jit
def gate_up(x, address, route, out, k, offset, section: tl.constexpr, how: tl.constexpr, LINE_STEP: tl.constexpr):
    """A tile of gate and of up, for one unit."""
    tiles: tl.constexpr = (section.rows + 15) // 16
    unit = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    record = tl.load(address + unit)
    if record == 0:
        return
    record = tl.multiple_of(record + offset, 64)
    row = tile * 16 + tl.arange(0, 16)
    for column in range(COLUMNS):
        here = tl.load(route + unit * COLUMNS + column).to(tl.int64)
        if here >= 0:
            token = x + here // k * (section.lines * section.positions)
            sums = row_sums(record, section, 2 * tile, token, 32, LINE_STEP)
            gate, up = tl.split(sums.reshape(2, 16).permute(1, 0))
            gate = finish(gate, record, section, 0, row)
            up = finish(up, record, section, 1, row)
            tl.store(out + here * section.rows + row, activate(gate, up, how), mask=row < section.rows)


@triton.jit
def down(h, address, route, out, offset, section: tl.constexpr, LINE_STEP: tl.constexpr):
    """A tile of down, for one unit."""
    tiles: tl.constexpr = (section.rows + 15) // 16
    unit = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    record = tl.load(address + unit)
    if record == 0:
        return
    record = tl.multiple_of(record + offset, 64)
    row = tile * 16 + tl.arange(0, 16)
    for column in range(COLUMNS):
        here = tl.load(route + unit * COLUMNS + column).to(tl.int64)
        if here >= 0:
            values = h + here * (section.lines * section.positions)
            sums = row_sums(record, section, tile, values, 16, LINE_STEP)
            sums = finish(sums, record, section, 0, row)
            tl.store(out + here * section.rows + row, sums, mask=row < section.rows)
