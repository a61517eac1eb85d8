"""Where dwords, scales, globals and biases lie in a record, for all Triton kernels; `tile_<name>.py` decodes them.

A kernel is compiled for a `Section` and takes the address of a record. Tiles are counted as in memory: gate and up
alternate.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from freetoken.formats.base import LANE_BYTES
from freetoken.formats.record import RecordLayout

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""The interpreter cuts bits off where a GPU rounds to bf16, and multiplies bf16 as if it were whole numbers."""


@dataclass(frozen=True)
class Section:
    """What a kernel knows of gate and up, or of down: N rows (of gate and as many of up) of K columns.

    rows: N. decode, scale, factor, folded: the format's, see `tile_bf16.py`. positions: weights of a dword. lines:
    dwords of a row. block_lines: lines that share a scale. scale_bytes: bytes of a scale. tile: dwords of a tile.
    matrix, globals, bias: bytes from the record to the first tile, the globals and the biases (0: there are none).
    """

    rows: int
    decode: Any
    scale: Any
    factor: float
    folded: bool
    positions: int
    lines: int
    block_lines: int
    scale_bytes: int
    tile: int
    matrix: int
    globals: int
    bias: int

    @staticmethod
    def of(layout: RecordLayout, name: str) -> Section:
        """The section "gate_up" or "down" of a layout."""
        fmt = layout.format
        n, k = (layout.intermediate, layout.hidden) if name == "gate_up" else (layout.hidden, layout.intermediate)
        module = importlib.import_module(f"freetoken.gpu.tile_{fmt.kernels}")
        return Section(
            rows=n,
            decode=module.decode,
            scale=module.scale,
            factor=module.FACTOR,
            folded=module.FOLDED,
            positions=fmt.line_k,
            lines=k // fmt.line_k,
            block_lines=fmt.block // fmt.line_k,
            scale_bytes=fmt.scale_bytes,
            tile=fmt.tile_bytes(k) // LANE_BYTES,
            matrix=layout.sections[name][0],
            globals=layout.sections[f"{name}_globals"][0],
            bias=layout.sections[f"{name}_bias"][0] if layout.bias else 0,
        )

    @property
    def cache_key(self) -> str:
        """What Triton tells compiled kernels apart by: also the text of the format's functions."""
        return f"{self}{self.decode.cache_key}{self.scale.cache_key}"


def check(tensor: torch.Tensor, name: str, width: int, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError unless a tensor is (any, width) and contiguous, TypeError unless it is of that type."""
    if tensor.ndim != 2 or tensor.shape[1] != width or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} with strides {tensor.stride()}, expected contiguous rows of {width}"
        )
    if dtype is not None and tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}, expected {dtype}")


@triton.jit
def load_dwords(record, section: tl.constexpr, tile, lane, line, there):
    """(L, N) int32: dword `line` (L,) of row `lane` (N,) of `tile` (N,); 0 where `there` (L, N) says no."""
    head: tl.constexpr = 4 * section.scale_bytes
    lines: tl.constexpr = section.block_lines
    at = line // lines * (head + 16 * lines) + head + line % lines * 16
    row = tile.to(tl.int64) * section.tile + lane
    dwords = (record + section.matrix).to(tl.pointer_type(tl.int32))
    return tl.load(dwords + at[:, None] + row[None, :], mask=there, other=0)


@triton.jit
def load_scales(record, section: tl.constexpr, tile, lane, block, there):
    """(B, N) float32: the scales of blocks (B,) of these rows; those of bits 0 where `there` (B, N) says no."""
    size: tl.constexpr = section.scale_bytes
    step: tl.constexpr = 16 + 64 * section.block_lines // size
    row = tile.to(tl.int64) * (section.tile * 4 // size) + lane
    if size == 1:
        scales = (record + section.matrix).to(tl.pointer_type(tl.uint8))
    elif size == 2:
        scales = (record + section.matrix).to(tl.pointer_type(tl.uint16))
    else:
        scales = (record + section.matrix).to(tl.pointer_type(tl.int32))
    return section.scale(tl.load(scales + (block * step)[:, None] + row[None, :], mask=there, other=0))


@triton.jit
def spread_scales(scales, LINES: tl.constexpr):
    """(B * LINES, N): a block's scales (B, N) for each of its lines."""
    blocks: tl.constexpr = scales.shape[0]
    rows: tl.constexpr = scales.shape[1]
    return tl.broadcast_to(scales[:, None, :], blocks, LINES, rows).reshape(blocks * LINES, rows)


@triton.jit
def finish(sums, record, section: tl.constexpr, second: tl.constexpr, row):
    """Sums (N, ...) of rows of gate or down, or with `second` of up, times their global, plus their biases."""
    value = tl.load((record + section.globals + 4 * second).to(tl.pointer_type(tl.float32)))
    mode = tl.load((record + section.globals + 8).to(tl.pointer_type(tl.int32)))
    sums *= tl.where(mode == 2, 1.0 / value, value) * section.factor
    if section.bias > 0:
        padded: tl.constexpr = (section.rows + 15) // 16 * 16
        biases = (record + section.bias).to(tl.pointer_type(tl.float32)) + second * padded
        bias = tl.load(biases + row, mask=row < section.rows, other=0.0)
        if len(sums.shape) == 2:
            bias = bias[:, None]
        sums += bias
    return sums


@triton.jit
def activate(gate, up, how: tl.constexpr):
    """The gated activation, as `kernels.reference.activate` defines it."""
    if how.kind == "silu":
        return gate / (1 + tl.exp(-gate)) * up
    else:
        gate = tl.minimum(gate, how.limit)
        up = tl.minimum(tl.maximum(up, -how.limit), how.limit)
        if how.kind == "silu_limited":
            return gate / (1 + tl.exp(-gate)) * up
        else:
            return gate / (1 + tl.exp(-how.alpha * gate)) * (up + 1)


@triton.jit
def narrow(values, dtype: tl.constexpr):
    """float32 values in `dtype`, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(dtype)


@triton.jit
def widen(values):
    """float32 of bf16 values, for the interpreter, which does not do it well with subnormal ones."""
    return (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def multiply_add(a, b, sums, PRECISION: tl.constexpr):
    """sums (M, N) float32 plus a (M, L) times b (L, N), both bf16 or both float32, then in that precision."""
    if INTERPRETED and a.dtype == tl.bfloat16:
        return tl.dot(widen(a), widen(b), sums, input_precision=PRECISION)
    else:
        return tl.dot(a, b, sums, input_precision=PRECISION)
