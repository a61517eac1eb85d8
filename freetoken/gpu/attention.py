"""Attention of one token of each sequence: grouped query heads on the keys and values of their one head.

    read     a slice of the columns: scores, their softmax as it runs, and values, for all query heads of a key head
    combine  the slices of a query head, and its sink

Columns are cut into slices so that a single sequence has programs for the whole device. With one slice `read` finishes
by itself. Every head of a key head multiplies with what is read once. Columns that the mask hides are not read, and
blocks of them not computed: neither what is outside of a window nor what is not written yet costs more than its mask,
and what lies there may be anything. Scores, softmax and sums are float32; probabilities are rounded to the type of
values before they are multiplied with them, after that of a whole row has been summed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.gpu.tiles import multiply_add, narrow

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of queries, keys and values, which have the same."""
WIDEST = 256
"""Width of a head at most."""
MOST_HEADS = 64
"""Query heads of a key head at most."""
_PROGRAMS = 512
"""At most about so many in one call: a few for each multiprocessor, which wait for memory side by side."""
_SLICES = 64
"""At most, since one program combines them."""
_TILE = 8192
"""Values of a block of keys, of two bytes each."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor | None,
    scaling: float,
    softcap: float = 0.0,
    slices: int | None = None,
) -> torch.Tensor:
    """(B, 1, H, V): softmax(softcap * tanh(scaling * query @ key / softcap) + mask) @ value, no tanh where that is 0.

    query: (B, H, 1, W). key: (B, H / G, C, W). value: (B, H / G, C, V). Widths have stride 1. mask: (B, 1, 1, C),
    floating; columns with its type's smallest number, or less, are hidden. sinks: (H,), a logit of each head that is
    one more in the sum; None for none. slices: of the columns; as many as suit the device where it is None. A row that
    sees nothing is zeros. Raises `ValueError` for what does not fit.
    """
    rows, heads, tokens, width = query.shape
    _, kv_heads, columns, _ = key.shape
    shapes = (rows, kv_heads, columns, width), (rows, kv_heads, columns, value.shape[-1]), (rows, 1, 1, columns)
    found = tuple(key.shape), tuple(value.shape), tuple(mask.shape)
    fits = tokens == 1 and heads % kv_heads == 0 and found == shapes and (sinks is None or sinks.shape == (heads,))
    if not fits or not rows or not columns:
        raise ValueError(
            f"query {tuple(query.shape)}, key, value and mask {', '.join(map(str, found))} and sinks "
            f"{None if sinks is None else tuple(sinks.shape)} do not fit: expected (B, H, 1, W), (B, H / G, C, W), "
            "(B, H / G, C, V), (B, 1, 1, C) and (H,), B and C at least 1"
        )
    if why := why_not_attend(query, key, value):
        raise ValueError(why)
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    sinks = None if sinks is None else sinks.contiguous()
    group, wide = heads // kv_heads, value.shape[-1]
    block = _block(width, wide, query.dtype)
    steps = triton.cdiv(triton.cdiv(columns, block), slices or _slices(rows * kv_heads, triton.cdiv(columns, block)))
    slices = triton.cdiv(columns, block * steps)
    out = torch.empty(rows, 1, heads, wide, dtype=query.dtype, device=query.device)
    sums, edges = out, out  # of slices; there are none of one
    if slices > 1:
        sums = torch.empty(rows, heads, slices, wide, dtype=torch.float32, device=query.device)
        edges = torch.empty(2, rows, heads, slices, dtype=torch.float32, device=query.device)
    read[(rows, kv_heads, slices)](
        query, key, value, mask, out if sinks is None else sinks, out, sums, edges, scaling, softcap,
        columns, *query.stride()[:2], *key.stride()[:3], *value.stride()[:3], mask.stride(0), mask.stride(3),
        HIDDEN=torch.finfo(mask.dtype).min, SINKS=sinks is not None, CAPPED=softcap != 0,
        GROUP=group, PADDED_GROUP=max(16, triton.next_power_of_2(group)),
        WIDTH=width, PADDED_WIDTH=max(16, triton.next_power_of_2(width)),
        WIDE=wide, PADDED_WIDE=max(16, triton.next_power_of_2(wide)), BLOCK=block, STEPS=steps, SLICES=slices,
        num_warps=4,
    )  # fmt: skip
    if slices > 1:
        combine[(rows * heads,)](
            sums, edges, out if sinks is None else sinks, out, rows * heads * slices, heads,
            SINKS=sinks is not None, SLICES=slices, PADDED_SLICES=triton.next_power_of_2(slices),
            WIDE=wide, PADDED_WIDE=triton.next_power_of_2(wide), num_warps=4,
        )  # fmt: skip
    return out


def why_not_attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    """Why `attend` does not take tensors of these types and widths; nothing if it does."""
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        return f"{query.dtype}, {key.dtype} and {value.dtype} are not float32, bfloat16 or float16 all three"
    if max(key.shape[-1], value.shape[-1]) > WIDEST:
        return f"heads of {key.shape[-1]} and {value.shape[-1]}, at most {WIDEST} is handled"
    if query.shape[1] > MOST_HEADS * key.shape[1]:
        return f"{query.shape[1]} heads for {key.shape[1]} of keys, at most {MOST_HEADS} for each are handled"
    return ""


def _block(width: int, wide: int, dtype: torch.dtype) -> int:
    """Columns that are multiplied at once."""
    fits: int = _TILE // (4 if dtype == torch.float32 else 1) // triton.next_power_of_2(max(width, wide))
    return max(16, min(64, fits))


def _slices(heads: int, blocks: int) -> int:
    """Slices of so many blocks of columns, for each of so many key heads of all rows."""
    return max(1, min(_SLICES, blocks, _PROGRAMS // heads))


@triton.jit
def read(
    query, key, value, mask, sinks, out, sums, edges, scaling, softcap, columns,
    query_row, query_head, key_row, key_head, key_column, value_row, value_head, value_column, mask_row, mask_column,
    HIDDEN: tl.constexpr, SINKS: tl.constexpr, CAPPED: tl.constexpr, GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, WIDE: tl.constexpr, PADDED_WIDE: tl.constexpr,
    BLOCK: tl.constexpr, STEPS: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Slice program_id(2), of STEPS blocks, of row program_id(0) and key head program_id(1)."""
    row, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    g = tl.arange(0, PADDED_GROUP)
    w = tl.arange(0, PADDED_WIDTH)
    v = tl.arange(0, PADDED_WIDE)
    head = kv_head * GROUP + g
    mine = (g < GROUP)[:, None]
    at = query + row * query_row + head[:, None] * query_head + w[None, :]
    vectors = tl.load(at, mask=mine & (w < WIDTH)[None, :], other=0.0)
    key += row * key_row + kv_head * key_head
    value += row * value_row + kv_head * value_head
    mask += row * mask_row

    top = tl.full((PADDED_GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED_GROUP,), tl.float32)
    result = tl.zeros((PADDED_GROUP, PADDED_WIDE), tl.float32)
    for step in range(STEPS):
        column = (part * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        bias = tl.load(mask + column * mask_column, mask=column < columns, other=float("-inf")).to(tl.float32)
        seen = bias > HIDDEN
        if tl.max(seen.to(tl.int32), 0) > 0:
            place = column.to(tl.int64)[:, None]
            keys = tl.load(key + place * key_column + w[None, :], mask=seen[:, None] & (w < WIDTH)[None, :], other=0.0)
            values = tl.load(
                value + place * value_column + v[None, :], mask=seen[:, None] & (v < WIDE)[None, :], other=0.0
            )
            none = tl.zeros((PADDED_GROUP, BLOCK), tl.float32)
            scores = multiply_add(vectors, tl.trans(keys), none, "ieee") * scaling
            if CAPPED:
                scores = softcap * _tanh(scores / softcap)
            scores = tl.where(seen[None, :], scores + bias[None, :], float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            faded = tl.exp(top - higher)
            shares = tl.exp(scores - higher[:, None])
            total = total * faded + tl.sum(shares, 1)
            result = multiply_add(narrow(shares, values.dtype), values, result * faded[:, None], "ieee")
            top = higher

    rows_of_head = row * tl.num_programs(1) * GROUP + head
    if SLICES == 1:
        sink = tl.full((PADDED_GROUP,), float("-inf"), tl.float32)
        if SINKS:
            sink = tl.load(sinks + head, mask=g < GROUP, other=float("-inf")).to(tl.float32)
        highest = _finite(tl.maximum(top, sink))
        share = tl.exp(top - highest)
        result *= (share / _whole(total * share + tl.exp(sink - highest)))[:, None]
        to = out + rows_of_head[:, None] * WIDE + v[None, :]
        tl.store(to, narrow(result, out.dtype.element_ty), mask=mine & (v < WIDE)[None, :])
    else:
        entry = rows_of_head * SLICES + part
        n = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * GROUP * SLICES
        tl.store(edges + entry, top, mask=g < GROUP)
        tl.store(edges + n + entry, total, mask=g < GROUP)
        tl.store(sums + entry[:, None] * WIDE + v[None, :], result, mask=mine & (v < WIDE)[None, :])


@triton.jit
def combine(
    sums, edges, sinks, out, entries, heads,
    SINKS: tl.constexpr, SLICES: tl.constexpr, PADDED_SLICES: tl.constexpr, WIDE: tl.constexpr,
    PADDED_WIDE: tl.constexpr,
):  # fmt: skip
    """Head program_id(0), counted over all rows. entries: all slices of all heads."""
    one = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, PADDED_SLICES)
    v = tl.arange(0, PADDED_WIDE)
    entry = one * SLICES + s
    top = tl.load(edges + entry, mask=s < SLICES, other=float("-inf"))
    total = tl.load(edges + entries + entry, mask=s < SLICES, other=0.0)
    result = tl.load(
        sums + entry[:, None] * WIDE + v[None, :], mask=(s < SLICES)[:, None] & (v < WIDE)[None, :], other=0.0
    )
    highest = tl.max(top, 0)
    if SINKS:
        sink = tl.load(sinks + one % heads).to(tl.float32)
        highest = _finite(tl.maximum(highest, sink))
        beside = tl.exp(sink - highest)
    else:
        highest = _finite(highest)
        beside = 0.0
    share = tl.exp(top - highest)
    result = tl.sum(result * share[:, None], 0) / _whole(tl.sum(total * share, 0) + beside)
    tl.store(out + one * WIDE + v, narrow(result, out.dtype.element_ty), mask=v < WIDE)


@triton.jit
def _tanh(x):
    """By a Taylor polynomial where x is small, for the difference would lose its digits there."""
    square = x * x
    small = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    return tl.where(square < 0.01, small, 2 / (1 + tl.exp(-2 * x)) - 1)


@triton.jit
def _finite(top):
    """Where nothing was seen, 0, from which minus infinity can be taken."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _whole(total):
    """Where nothing was seen, 1, by which nothing can be divided. A NaN stays one."""
    return tl.where(total == 0, 1.0, total)
