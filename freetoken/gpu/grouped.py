"""Prefill: all routes of an expert in one product, from its record, on the tensor cores.

    spread    a copy of x in the order of K in which tiles are decoded, in the type that is multiplied
    schedule  which routes of which expert each program has
    gate_up   weights (rows) times routes (columns), biases, globals, activation
    down      the same, then each route's row goes to its own place

Weights are the left operand: they are decoded into the registers from which the tensor cores take it. A dword holds
several weights along K, and lines follow each other, so a step multiplies weight 0 of all its lines, then weight 1, and
so on; `spread` puts the activations in that order. bf16 activations are multiplied as they are; fp16 ones as tf32,
whose numbers hold them and have the exponents that scales need; float32 ones without the tensor cores. Sums are
float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from freetoken.executor import Activation
from freetoken.formats.record import RecordLayout
from freetoken.gpu.tiles import (
    Section,
    activate,
    check,
    finish,
    load_dwords,
    load_scales,
    multiply_add,
    narrow,
    spread_scales,
)

_SPREAD = 1024
"""Values of a program that spreads them."""
_THREE_STAGES = 150_000
"""Bytes of shared memory from which on three steps are under way at once; most that they take is 132 KB."""


class GroupedProduct:
    """Both products of one shard's experts for routes that are sorted by expert. Holds no tensor."""

    def __init__(self, layout: RecordLayout, activation: Activation) -> None:
        self.layout = layout
        self.activation = activation
        self._gate_up = Section.of(layout, "gate_up")
        self._down = Section.of(layout, "down")

    def gate_up(
        self,
        x: torch.Tensor,
        order: torch.Tensor,
        starts: torch.Tensor,
        address: torch.Tensor,
        k: int,
        out: torch.Tensor,
        offset: int = 0,
    ) -> None:
        """Write the hidden values of each route to the row of `out` that is its position in `order`.

        x: (T, H) float32, bf16 or fp16. order: (T * k,) int32, routes (token * k + position) sorted by expert. starts:
        (E + 1,) int32, where each expert's routes start in it; what lies behind the last is of no expert and left
        alone. address: (E,) int64, where each expert's record lies; the rows of an expert with 0 are left alone. out:
        (T * k, I), float32 where x is, else bf16. offset: bytes from an address to this shard's record.
        """
        check(x, "x", self.layout.hidden)
        check(out, "out", self.layout.intermediate, hidden_dtype(x.dtype))
        work = Work.of(x, self._gate_up, order, starts, address, out, k)
        if work.routes:
            how = self._gate_up, self.activation
            gate_up[work.programs(2)](
                work.x, work.width, order, work.pieces, address, out, offset, k, *how, **work.shape
            )

    def down(
        self,
        h: torch.Tensor,
        starts: torch.Tensor,
        address: torch.Tensor,
        order: torch.Tensor,
        out: torch.Tensor,
        offset: int = 0,
    ) -> None:
        """Write the output of each route, unweighted, to its own row of `out`: that of token * k + position.

        h: (T * k, I), as `gate_up` wrote it. out: (T * k, H) float32. The rest as there.
        """
        check(h, "h", self.layout.intermediate, hidden_dtype(h.dtype))
        check(out, "out", self.layout.hidden, torch.float32)
        work = Work.of(h, self._down, order, starts, address, out, 1)
        if work.routes:
            how = (self._down,)
            down[work.programs(1)](work.x, work.width, order, work.pieces, address, out, offset, *how, **work.shape)


@dataclass(frozen=True)
class Work:
    """One product's activations in the order of K in which they are multiplied, and its pieces of work."""

    routes: int
    section: Section
    shape: dict[str, Any]
    x: torch.Tensor
    width: int
    pieces: torch.Tensor

    @staticmethod
    def of(
        x: torch.Tensor,
        section: Section,
        order: torch.Tensor,
        starts: torch.Tensor,
        address: torch.Tensor,
        out: torch.Tensor,
        k: int,
    ) -> Work:
        """Of rows of x that k routes share; raises ValueError where the number of routes is not always the same."""
        routes, experts = len(order), len(address)
        if len(starts) != experts + 1 or len(out) != routes or len(x) * k != routes:
            raise ValueError(
                f"{routes} routes, {len(x)} rows for {k} each, {len(starts)} starts of {experts} experts and "
                f"{len(out)} rows of output do not fit"
            )
        shape = choose_shape(x, section, routes / experts)
        step = shape["LINE_STEP"]
        steps = triton.cdiv(section.lines, step)
        width = steps * step * section.positions
        in_order = x.new_empty((len(x), width), dtype=torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32)
        pieces = starts.new_empty((routes // shape["COLUMNS"] + min(experts, routes), 3))
        if routes:
            grid = (len(x), triton.cdiv(width, _SPREAD))
            spread[grid](x, in_order, section.lines, steps, section.positions, step, _SPREAD)
            width_of_experts = triton.next_power_of_2(experts)
            schedule[(triton.cdiv(len(pieces), 64),)](
                starts, pieces, experts, len(pieces), width_of_experts, shape["COLUMNS"], 64
            )
        return Work(routes, section, shape, in_order, width, pieces)

    def programs(self, matrices: int) -> tuple[int]:
        """How many programs there are when each has rows of so many matrices."""
        return (triton.cdiv(self.section.rows, self.shape["ROWS"] // matrices) * len(self.pieces),)


def sort_routes(ids: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`order` and `starts`, as `GroupedProduct.gate_up` takes them, of ids (T, k) integer.

    Routes of an expert stay in their order; those of ids outside [0, n_experts) come last.
    """
    ids = ids.contiguous()
    order = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    starts = torch.empty(n_experts + 1, dtype=torch.int32, device=ids.device)
    collect[(n_experts + 1,)](ids, order, starts, ids.numel(), n_experts, WIDTH=1024, num_warps=4)
    return order, starts


def hidden_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of hidden values, for a type of activations."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def choose_shape(x: torch.Tensor, section: Section, per_expert: float) -> dict[str, Any]:
    """What a program computes at once, for activations, a matrix, and the routes that an expert has on average.

    The best of 37 shapes for 4-bit formats, and of 6 to 9 for the others and for float32, on an H200 with 128 experts
    of 2048/768 and 2880/2880 and 0.5 to 512 routes each. fp16 and GPUs with less shared memory were not measured.
    """
    columns = max(triton.next_power_of_2(int(1.5 * per_expert)), 16)
    if x.dtype == torch.float32:
        columns = min(columns, 64)
        return {"ROWS": 64, "COLUMNS": columns, "LINE_STEP": 8, "PRECISION": "ieee", "num_warps": 4, "num_stages": 1}
    return {
        "ROWS": 128 if section.folded else 64,
        "COLUMNS": min(columns, 128 if section.folded and x.dtype == torch.bfloat16 else 64),
        "LINE_STEP": 16 if section.folded and section.positions > 2 else 32,
        "PRECISION": "tf32",
        "num_warps": 4,
        "num_stages": 3 if _shared_memory(x.device) > _THREE_STAGES else 2,
    }


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have on a device."""
    if device.type != "cuda":
        return 0
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


@triton.jit
def collect(ids, order, starts, routes, n_experts, WIDTH: tl.constexpr):
    """The routes of expert program_id(0), or of no expert, behind those of the experts before it."""
    mine = tl.program_id(0)
    before = tl.zeros((WIDTH,), tl.int32)
    for first in range(0, routes, WIDTH):
        expert = load_experts(ids, first + tl.arange(0, WIDTH), routes, n_experts)
        before += (expert < mine).to(tl.int32)
    start = tl.sum(before, 0)
    tl.store(starts + mine, start)
    for first in range(0, routes, WIDTH):
        route = first + tl.arange(0, WIDTH)
        is_mine = (load_experts(ids, route, routes, n_experts) == mine) & (route < routes)
        tl.store(order + start + tl.cumsum(is_mine.to(tl.int32), 0) - 1, route, mask=is_mine)
        start += tl.sum(is_mine.to(tl.int32), 0)


@triton.jit
def load_experts(ids, route, routes, n_experts):
    """The experts of routes; n_experts for ids of none and where there is no route."""
    expert = tl.load(ids + route, mask=route < routes, other=-1)
    return tl.where((expert >= 0) & (expert < n_experts), expert, n_experts).to(tl.int32)


@triton.jit
def spread(x, out, LINES, STEPS, POSITIONS: tl.constexpr, LINE_STEP: tl.constexpr, WIDTH: tl.constexpr):
    """out[t, step, i, line] = x[t, step, line, i], with 0 for lines from LINES on."""
    row = tl.program_id(0).to(tl.int64)
    to = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    i = to // LINE_STEP % POSITIONS
    line = to // (LINE_STEP * POSITIONS) * LINE_STEP + to % LINE_STEP
    values = tl.load(x + row * (LINES * POSITIONS) + line * POSITIONS + i, mask=line < LINES, other=0.0)
    width = STEPS * (LINE_STEP * POSITIONS)
    tl.store(out + row * width + to, narrow(values.to(tl.float32), out.dtype.element_ty), mask=to < width)


@triton.jit
def schedule(starts, work, experts, size, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """work (size, 3) int32: an expert, the first position and the one after the last; -1, 0, 0 when nothing is left."""
    piece = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    expert = tl.arange(0, EXPERTS)
    start = tl.load(starts + expert, mask=expert < experts, other=0)
    stop = tl.load(starts + expert + 1, mask=expert < experts, other=0)
    ends = tl.cumsum((stop - start + COLUMNS - 1) // COLUMNS, 0)
    passed = ends[None, :] <= piece[:, None]
    mine = tl.sum(passed.to(tl.int32), 1)
    before = tl.max(tl.where(passed, ends[None, :], 0), 1)
    there = mine < experts
    first = tl.load(starts + mine, mask=there, other=0) + (piece - before) * COLUMNS
    last = tl.minimum(first + COLUMNS, tl.load(starts + mine + 1, mask=there, other=0))
    tl.store(work + piece * 3, tl.where(there, mine, -1), mask=piece < size)
    tl.store(work + piece * 3 + 1, tl.where(there, first, 0), mask=piece < size)
    tl.store(work + piece * 3 + 2, tl.where(there, last, 0), mask=piece < size)


@triton.jit
def stack(a, b):
    """(2 L, N): a (L, N), then b."""
    return tl.join(a, b).permute(2, 0, 1).reshape(2 * a.shape[0], a.shape[1])


@triton.jit
def decode_two(dwords, scales, i: tl.constexpr, dtype: tl.constexpr, decode: tl.constexpr):
    """(2 L, N): weights i of all dwords, then weights i + 1."""
    return stack(narrow(decode(dwords, i) * scales, dtype), narrow(decode(dwords, i + 1) * scales, dtype))


@triton.jit
def decode_four(dwords, scales, i: tl.constexpr, dtype: tl.constexpr, decode: tl.constexpr):
    """(4 L, N): weights i to i + 3."""
    return stack(decode_two(dwords, scales, i, dtype, decode), decode_two(dwords, scales, i + 2, dtype, decode))


@triton.jit
def decode_all(dwords, scales, dtype: tl.constexpr, section: tl.constexpr):
    """(positions * L, N): weight 0 of all dwords (L, N), then weight 1, and so on, times their scales."""
    decode: tl.constexpr = section.decode
    if section.positions == 2:
        return decode_two(dwords, scales, 0, dtype, decode)
    elif section.positions == 4:
        return decode_four(dwords, scales, 0, dtype, decode)
    else:
        return stack(decode_four(dwords, scales, 0, dtype, decode), decode_four(dwords, scales, 4, dtype, decode))


@triton.jit
def products(
    record,
    section: tl.constexpr,
    tile,
    lane,
    x,
    column_there,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LINE_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    TILES: tl.constexpr,
):
    """(ROWS, COLUMNS) float32: rows `lane` of tiles `tile` times the columns that start at x (COLUMNS,).

    What is not there, behind the TILES of the section or in other columns, is 0.
    """
    block_lines: tl.constexpr = section.block_lines
    tl.static_assert(section.folded or block_lines % LINE_STEP == 0, "a step lies within a block whose sum is scaled")
    tile_there = (tile < TILES)[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, section.lines, LINE_STEP):
        k = at * section.positions + tl.arange(0, LINE_STEP * section.positions)
        columns = tl.load(x[None, :] + k[:, None], mask=column_there[None, :], other=0.0)
        line = at + tl.arange(0, LINE_STEP)
        dwords = load_dwords(record, section, tile, lane, line, (line < section.lines)[:, None] & tile_there)
        if section.scale_bytes == 0:
            weights = decode_all(dwords, 1.0, columns.dtype, section)
            sums = multiply_add(tl.trans(weights), columns, sums, PRECISION)
        elif section.folded:
            block = at // block_lines + tl.arange(0, LINE_STEP // block_lines)
            there = (block < section.lines // block_lines)[:, None] & tile_there
            scales = spread_scales(load_scales(record, section, tile, lane, block, there), block_lines)
            weights = decode_all(dwords, scales, columns.dtype, section)
            sums = multiply_add(tl.trans(weights), columns, sums, PRECISION)
        else:
            weights = decode_all(dwords, 1.0, columns.dtype, section)
            part = multiply_add(tl.trans(weights), columns, tl.zeros((ROWS, COLUMNS), tl.float32), PRECISION)
            block = at // block_lines + tl.zeros((1,), tl.int32)
            sums += part * tl.trans(load_scales(record, section, tile, lane, block, tile_there))
    return sums


@triton.jit
def gate_up(
    x,
    width,
    order,
    work,
    address,
    out,
    offset,
    k,
    section: tl.constexpr,
    how: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LINE_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """ROWS / 2 rows of gate and the same of up, for a piece of work."""
    half: tl.constexpr = ROWS // 2
    tiles: tl.constexpr = (section.rows + 15) // 16
    blocks: tl.constexpr = (section.rows + half - 1) // half
    piece = work + tl.program_id(0) // blocks * 3
    expert = tl.load(piece)
    if expert < 0:
        return
    record = tl.load(address + expert)
    if record == 0:
        return
    record = tl.multiple_of(record + offset, 64)
    position = tl.load(piece + 1) + tl.arange(0, COLUMNS).to(tl.int64)
    live = position < tl.load(piece + 2)
    token = tl.load(order + position, mask=live, other=0).to(tl.int64) // k
    start = tl.program_id(0) % blocks * half
    within = tl.arange(0, ROWS)
    # Gate's tiles, then up's. In other words than these Triton does not see that 16 rows lie beside each other.
    tile = 2 * (start // 16 + within // 16 % (half // 16)) + within // 16 // (half // 16)
    columns = x + token * width
    sums = products(record, section, tile, within % 16, columns, live, ROWS, COLUMNS, LINE_STEP, PRECISION, 2 * tiles)
    gate, up = tl.split(sums.reshape(2, half, COLUMNS).permute(1, 2, 0))
    row = start + tl.arange(0, half)
    gate = finish(gate, record, section, 0, row)
    up = finish(up, record, section, 1, row)
    there = live[None, :] & (row < section.rows)[:, None]
    hidden = narrow(activate(gate, up, how), out.dtype.element_ty)
    tl.store(out + position[None, :] * section.rows + row[:, None], hidden, mask=there)


@triton.jit
def down(
    h,
    width,
    order,
    work,
    address,
    out,
    offset,
    section: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LINE_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """ROWS rows of down for a piece of work."""
    tiles: tl.constexpr = (section.rows + 15) // 16
    blocks: tl.constexpr = (section.rows + ROWS - 1) // ROWS
    piece = work + tl.program_id(0) // blocks * 3
    expert = tl.load(piece)
    if expert < 0:
        return
    record = tl.load(address + expert)
    if record == 0:
        return
    record = tl.multiple_of(record + offset, 64)
    position = tl.load(piece + 1) + tl.arange(0, COLUMNS).to(tl.int64)
    live = position < tl.load(piece + 2)
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    columns = h + position * width
    sums = products(record, section, row // 16, row % 16, columns, live, ROWS, COLUMNS, LINE_STEP, PRECISION, tiles)
    sums = finish(sums, record, section, 0, row)
    route = tl.load(order + position, mask=live, other=0).to(tl.int64)
    there = live[None, :] & (row < section.rows)[:, None]
    tl.store(out + route[None, :] * section.rows + row[:, None], sums, mask=there)
