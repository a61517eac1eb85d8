"""Prefill: all routes of an expert in one product, from its record, on the tensor cores.

    spread    a copy of x in the order of K in which tiles are decoded, in the type that is multiplied
    schedule  which routes of which expert each program has
    gate_up   weights (rows) times routes (columns), biases, globals, activation
    down      the same, then each route's row goes to its own place

Weights are the left operand: they are decoded into the registers from which the tensor cores take it. A dword holds several
weights along K, and lines follow each other, so the product is done for weight 0 of all lines of a step, then for weight
1, and so on; `spread` puts the activations in that order. bf16 activations are multiplied as they are; fp16 ones as tf32,
whose numbers hold them and have the exponents that scales need; float32 ones without the tensor cores. Sums are float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from freetoken.executor import Activation
from freetoken.formats.record import RecordLayout
from freetoken.gpu.tiles import (
    activate,
    check,
    constants,
    load_bias,
    load_dwords,
    load_factor,
    load_scales,
    multiply_add,
    narrow,
    spread_scales,
)

_SPREAD = 1024


class GroupedProduct:
    """Both products of one shard's experts for routes that are sorted by expert. Holds no tensor."""

    def __init__(self, layout: RecordLayout, activation: Activation) -> None:
        self.layout = layout
        self._gate_up = constants(layout, "gate_up")
        self._down = constants(layout, "down")
        self._activation = {"KIND": activation.kind, "ALPHA": activation.alpha, "LIMIT": activation.limit}

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
        self._run(gate_up, {**self._gate_up, **self._activation}, x, order, starts, address, out, offset, k)

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
        self._run(down, self._down, h, order, starts, address, out, offset, 1)

    def _run(
        self,
        kernel: Any,
        how: dict[str, Any],
        source: torch.Tensor,
        order: torch.Tensor,
        starts: torch.Tensor,
        address: torch.Tensor,
        out: torch.Tensor,
        offset: int,
        k: int,
    ) -> None:
        routes, experts = len(order), len(address)
        if len(starts) != experts + 1 or len(out) != routes or len(source) * k != routes:
            raise ValueError(
                f"{routes} routes of {len(source)} rows and {len(starts)} starts of {experts} experts do not fit {len(out)} rows of output"
            )
        if not routes:
            return
        multiplied = torch.bfloat16 if source.dtype == torch.bfloat16 else torch.float32
        shape = choose_shape(source.dtype, how, routes / experts)
        step, positions = shape["LINE_STEP"], how["POSITIONS"]
        steps = triton.cdiv(how["LINES"], step)
        width = steps * step * positions
        in_order = source.new_empty((len(source), width), dtype=multiplied)
        grid = (len(source), triton.cdiv(width, _SPREAD))
        spread[grid](source, in_order, how["LINES"], steps, positions, step, _SPREAD)
        work = starts.new_empty((routes // shape["COLUMNS"] + min(experts, routes), 3))
        pieces = triton.next_power_of_2(experts)
        schedule[(triton.cdiv(len(work), 64),)](starts, work, experts, len(work), pieces, shape["COLUMNS"], 64)
        rows = shape["ROWS"] // (2 if kernel is gate_up else 1)
        programs = (triton.cdiv(how["N"], rows) * len(work),)
        kernel[programs](in_order, width, order, work, address, out, offset, k, **how, **shape)


def sort_routes(ids: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`order` and `starts`, as `GroupedProduct.gate_up` takes them, of ids (T, k) integer, contiguous.

    Routes of an expert stay in their order; those of ids outside [0, n_experts) come last.
    """
    order = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    starts = torch.empty(n_experts + 1, dtype=torch.int32, device=ids.device)
    collect[(n_experts + 1,)](ids, order, starts, ids.numel(), n_experts, WIDTH=1024, num_warps=4)
    return order, starts


def hidden_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of hidden values, for a type of activations."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def choose_shape(dtype: torch.dtype, how: dict[str, Any], per_expert: float) -> dict[str, Any]:
    """What a program computes at once, for a type of activations, a matrix, and the routes of an expert on average."""
    if dtype == torch.float32:
        return {"ROWS": 32, "COLUMNS": 16, "LINE_STEP": 16, "PRECISION": "ieee", "num_warps": 4, "num_stages": 1}
    most = 128 if dtype == torch.bfloat16 and how["FOLDED"] else 64
    return {
        "ROWS": 128,
        "COLUMNS": min(max(triton.next_power_of_2(int(1.5 * per_expert)), 16), most),
        "LINE_STEP": 128 // how["POSITIONS"],
        "PRECISION": "tf32",
        "num_warps": 4,
        "num_stages": 3,
    }


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
    """work (size, 3) int32: an expert, its first position and the one after the last; -1, 0, 0 where nothing is left."""
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
def decode_two(dwords, scales, i: tl.constexpr, dtype: tl.constexpr, DECODE: tl.constexpr):
    """(2 L, N): weights i of all dwords, then weights i + 1."""
    return stack(narrow(DECODE(dwords, i) * scales, dtype), narrow(DECODE(dwords, i + 1) * scales, dtype))


@triton.jit
def decode_four(dwords, scales, i: tl.constexpr, dtype: tl.constexpr, DECODE: tl.constexpr):
    """(4 L, N): weights i to i + 3."""
    return stack(decode_two(dwords, scales, i, dtype, DECODE), decode_two(dwords, scales, i + 2, dtype, DECODE))


@triton.jit
def decode_all(dwords, scales, dtype: tl.constexpr, DECODE: tl.constexpr, POSITIONS: tl.constexpr):
    """(POSITIONS * L, N): weight 0 of all dwords (L, N), then weight 1, and so on, times the scales of their dwords."""
    if POSITIONS == 2:
        return decode_two(dwords, scales, 0, dtype, DECODE)
    elif POSITIONS == 4:
        return decode_four(dwords, scales, 0, dtype, DECODE)
    else:
        return stack(decode_four(dwords, scales, 0, dtype, DECODE), decode_four(dwords, scales, 4, dtype, DECODE))


@triton.jit
def products(
    matrix,
    tile,
    lane,
    there,
    x,
    column_there,
    DECODE: tl.constexpr,
    SCALE: tl.constexpr,
    FOLDED: tl.constexpr,
    POSITIONS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_LINES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LINE_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(ROWS, COLUMNS) float32: rows `lane` of tiles `tile`, where they are there, times the columns that start at x (COLUMNS,)."""
    tl.static_assert(FOLDED or BLOCK_LINES % LINE_STEP == 0, "a step must lie within a block whose sum is scaled")
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, LINES, LINE_STEP):
        k = at * POSITIONS + tl.arange(0, LINE_STEP * POSITIONS)
        columns = tl.load(x[None, :] + k[:, None], mask=column_there[None, :], other=0.0)
        line = at + tl.arange(0, LINE_STEP)
        dwords = load_dwords(
            matrix, tile, lane, line, (line < LINES)[:, None] & there[None, :], BLOCK_LINES, SCALE_BYTES, TILE
        )
        if SCALE_BYTES == 0:
            weights = decode_all(dwords, 1.0, columns.dtype, DECODE, POSITIONS)
            sums = multiply_add(tl.trans(weights), columns, sums, PRECISION)
        elif FOLDED:
            block = at // BLOCK_LINES + tl.arange(0, LINE_STEP // BLOCK_LINES)
            here = (block < LINES // BLOCK_LINES)[:, None] & there[None, :]
            bits = load_scales(matrix, tile, lane, block, here, BLOCK_LINES, SCALE_BYTES, TILE)
            weights = decode_all(dwords, spread_scales(SCALE(bits), BLOCK_LINES), columns.dtype, DECODE, POSITIONS)
            sums = multiply_add(tl.trans(weights), columns, sums, PRECISION)
        else:
            weights = decode_all(dwords, 1.0, columns.dtype, DECODE, POSITIONS)
            part = multiply_add(tl.trans(weights), columns, tl.zeros((ROWS, COLUMNS), tl.float32), PRECISION)
            block = at // BLOCK_LINES + tl.zeros((1,), tl.int32)
            bits = load_scales(matrix, tile, lane, block, there[None, :], BLOCK_LINES, SCALE_BYTES, TILE)
            sums += part * tl.trans(SCALE(bits))
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LINE_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """ROWS / 2 rows of gate and the same of up, for a piece of work."""
    half: tl.constexpr = ROWS // 2
    blocks: tl.constexpr = (N + half - 1) // half
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
    tile = start // 16 + within // 16 % (half // 16)
    sums = products(
        (record + MATRIX).to(tl.pointer_type(tl.int32)),
        2 * tile + within // 16 // (half // 16),
        within % 16,
        tile < (N + 15) // 16,
        x + token * width,
        live,
        DECODE,
        SCALE,
        FOLDED,
        POSITIONS,
        LINES,
        BLOCK_LINES,
        SCALE_BYTES,
        TILE,
        ROWS,
        COLUMNS,
        LINE_STEP,
        PRECISION,
    )
    gate, up = tl.split(sums.reshape(2, half, COLUMNS).permute(1, 2, 0))
    row = start + tl.arange(0, half)
    gate = gate * load_factor(record, 0, GLOBALS, FACTOR) + load_bias(record, 0, row, BIAS, N)[:, None]
    up = up * load_factor(record, 1, GLOBALS, FACTOR) + load_bias(record, 1, row, BIAS, N)[:, None]
    hidden = narrow(activate(gate, up, KIND, ALPHA, LIMIT), out.dtype.element_ty)
    tl.store(out + position[None, :] * N + row[:, None], hidden, mask=live[None, :] & (row < N)[:, None])


@triton.jit
def down(
    h,
    width,
    order,
    work,
    address,
    out,
    offset,
    k,
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LINE_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """ROWS rows of down for a piece of work."""
    blocks: tl.constexpr = (N + ROWS - 1) // ROWS
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
    sums = products(
        (record + MATRIX).to(tl.pointer_type(tl.int32)),
        row // 16,
        row % 16,
        row // 16 < (N + 15) // 16,
        h + position * width,
        live,
        DECODE,
        SCALE,
        FOLDED,
        POSITIONS,
        LINES,
        BLOCK_LINES,
        SCALE_BYTES,
        TILE,
        ROWS,
        COLUMNS,
        LINE_STEP,
        PRECISION,
    )
    sums = sums * load_factor(record, 0, GLOBALS, FACTOR) + load_bias(record, 0, row, BIAS, N)[:, None]
    route = tl.load(order + position, mask=live, other=0).to(tl.int64)
    sums = narrow(sums, out.dtype.element_ty)
    tl.store(out + route[None, :] * N + row[:, None], sums, mask=live[None, :] & (row < N)[:, None])
