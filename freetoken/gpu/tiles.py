"""Where dwords, scales, factors and biases lie in a record, for all Triton kernels; what dwords mean is in tile_<name>.py.

Kernels take the address of a matrix's first tile and `constants`. Tiles are counted as in memory: gate and up alternate.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import triton
import triton.language as tl

from freetoken.formats.base import LANE_BYTES
from freetoken.formats.record import RecordLayout

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""The interpreter cuts bits off where a GPU rounds to bf16, and multiplies bf16 as if it were whole numbers."""


def constants(layout: RecordLayout, section: str) -> dict[str, Any]:
    """What kernels are compiled with to read the section "gate_up" or "down": N rows (of gate, and as many of up)."""
    fmt = layout.format
    n, k = (layout.intermediate, layout.hidden) if section == "gate_up" else (layout.hidden, layout.intermediate)
    module = importlib.import_module(f"freetoken.gpu.tile_{fmt.kernels}")
    return {
        "N": n,
        "DECODE": module.decode,
        "SCALE": module.scale,
        "FACTOR": module.FACTOR,
        "FOLDED": module.FOLDED,
        "POSITIONS": fmt.line_k,
        "LINES": k // fmt.line_k,
        "BLOCK_LINES": fmt.block // fmt.line_k,
        "SCALE_BYTES": fmt.scale_bytes,
        "TILE": fmt.tile_bytes(k) // LANE_BYTES,
        "MATRIX": layout.sections[section][0],
        "GLOBALS": layout.sections[f"{section}_globals"][0],
        "BIAS": layout.sections[f"{section}_bias"][0] if layout.bias else 0,
    }


def check(tensor: torch.Tensor, name: str, width: int, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError unless a tensor is (any, width), contiguous, and of that type."""
    if tensor.ndim != 2 or tensor.shape[1] != width or not tensor.is_contiguous():
        raise ValueError(f"{name} is {tuple(tensor.shape)} with strides {tensor.stride()}, expected rows of {width}")
    if dtype is not None and tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}, expected {dtype}")


@triton.jit
def load_dwords(
    matrix, tile, lane, line, there, BLOCK_LINES: tl.constexpr, SCALE_BYTES: tl.constexpr, TILE: tl.constexpr
):
    """(L, N) int32: dword `line` (L,) of row `lane` (N,) of `tile` (N,); 0 where `there` (L, N) says no."""
    head: tl.constexpr = 4 * SCALE_BYTES
    at = line // BLOCK_LINES * (head + 16 * BLOCK_LINES) + head + line % BLOCK_LINES * 16
    row = tile.to(tl.int64) * TILE + lane
    return tl.load(matrix + at[:, None] + row[None, :], mask=there, other=0)


@triton.jit
def load_scales(
    matrix, tile, lane, block, there, BLOCK_LINES: tl.constexpr, SCALE_BYTES: tl.constexpr, TILE: tl.constexpr
):
    """(B, N): the bits of the scales of blocks (B,) of these rows; 0 where `there` (B, N) says no."""
    if SCALE_BYTES == 1:
        scales = matrix.to(tl.pointer_type(tl.uint8))
    elif SCALE_BYTES == 2:
        scales = matrix.to(tl.pointer_type(tl.uint16))
    else:
        scales = matrix.to(tl.pointer_type(tl.int32))
    step: tl.constexpr = 16 + 64 * BLOCK_LINES // SCALE_BYTES
    row = tile.to(tl.int64) * (TILE * 4 // SCALE_BYTES) + lane
    return tl.load(scales + (block * step)[:, None] + row[None, :], mask=there, other=0)


@triton.jit
def spread_scales(scales, BLOCK_LINES: tl.constexpr):
    """(B * BLOCK_LINES, N): a block's scales (B, N) for each of its lines."""
    b: tl.constexpr = scales.shape[0]
    n: tl.constexpr = scales.shape[1]
    return tl.broadcast_to(scales[:, None, :], b, BLOCK_LINES, n).reshape(b * BLOCK_LINES, n)


@triton.jit
def load_factor(record, second: tl.constexpr, GLOBALS: tl.constexpr, FACTOR: tl.constexpr):
    """What sums of gate or down, or with `second` those of up, are multiplied with: the global, or one over it."""
    value = tl.load((record + GLOBALS + 4 * second).to(tl.pointer_type(tl.float32)))
    mode = tl.load((record + GLOBALS + 8).to(tl.pointer_type(tl.int32)))
    return tl.where(mode == 2, 1.0 / value, value) * FACTOR


@triton.jit
def load_bias(record, second: tl.constexpr, row, BIAS: tl.constexpr, N: tl.constexpr):
    """float32 biases of rows of gate or down, or with `second` of up; 0 where there are none."""
    if BIAS == 0:
        return tl.zeros(row.shape, tl.float32)
    else:
        biases = (record + BIAS).to(tl.pointer_type(tl.float32)) + second * ((N + 15) // 16 * 16)
        return tl.load(biases + row, mask=row < N, other=0.0)


@triton.jit
def activate(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The gated activation, as `kernels.reference.activate` defines it."""
    if KIND == "silu":
        return gate / (1 + tl.exp(-gate)) * up
    else:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        if KIND == "silu_limited":
            return gate / (1 + tl.exp(-gate)) * up
        else:
            return gate / (1 + tl.exp(-ALPHA * gate)) * (up + 1)


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
    """sums (M, N) float32 plus a (M, L) times b (L, N), both bf16 or both float32, then multiplied in that precision."""
    if INTERPRETED and a.dtype == tl.bfloat16:
        return tl.dot(widen(a), widen(b), sums, input_precision=PRECISION)
    else:
        return tl.dot(a, b, sums, input_precision=PRECISION)
