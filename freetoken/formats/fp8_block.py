"""fp8_block: e4m3 codes, fp32 scales that multiply, given per 128 x 128 block of the weight.

Checkpoints write codes as `weight`, F8_E4M3, and a grid of scales that multiply, usually (ceil(N / 128),
ceil(K / 128)): `weight_scale_inv` (transformers, in spite of its name), `weight_scale` (compressed-tensors, ModelOpt)
or `scale` (DeepSeek-V4), each in F32, BF16 or F8_E8M0. One scale for a row or for all is a grid of longer blocks. A
`Matrix` holds a scale for each row and 128 columns: `from_grid` repeats a grid's rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.errors import FormatError
from freetoken.formats.base import Format, Matrix, ScaleBlock, Scales, Spelling
from freetoken.formats.codes import E4M3, E8M0, fp32_to_e4m3

_BLOCK = 128
_SMALLEST = np.float32(448 * 2.0**-126)
"""Blocks of smaller weights take the smallest normal scale: a subnormal one costs some processors dearly."""
_LARGEST = np.finfo(np.float32).max / np.float32(448)
_FROM_2_113, _SIGN = 0x78000000, 0x80000000
"""Bits that all NaN, infinite and too large fp32 have, and others from 2**113 up; and all negative ones."""


class FP8Block(Format):
    """Value = e4m3 * fp32 scale. A row's last block may be ragged, by lines of 4 weights."""

    name = "fp8_block"
    bits = 8
    block = _BLOCK
    scale_dtype = np.uint32
    keeps_scales = False
    ragged = True
    row_group = _BLOCK
    code_alarm = 0x7F
    scale_alarms = (_FROM_2_113, _SIGN)
    kernels = "fp8_block"
    spellings = tuple(
        Spelling(
            name,
            {"codes": ("weight", ("F8_E4M3",)), "scales": (suffix, ("F32", "BF16", "F8_E8M0"))},
            optional=("input_scale", "activation_scale"),
        )
        for name, suffix in (
            ("transformers", "weight_scale_inv"),
            ("compressed-tensors", "weight_scale"),
            ("deepseek", "scale"),
        )
    )

    def quantize_rows(
        self, weights: NDArray[np.float32], factor: np.float32
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        """Scale amax / 448 of each 128 x 128 block, in the operations of transformers' Fp8Quantize."""
        n, k = weights.shape
        edges = [np.arange(0, size, _BLOCK) for size in (n, k)]
        amax = np.maximum.reduceat(np.maximum.reduceat(np.abs(weights), edges[1], axis=1), edges[0], axis=0)
        amax = np.where(amax > 0, np.maximum(amax, _SMALLEST), np.float32(448))
        forward = (np.float32(448) * (1 / amax)).astype(np.float32)  # torch divides a number by a tensor like this
        scaled = weights * _expand(forward, n, k)
        sign = np.signbit(scaled).view(np.uint8) << np.uint8(7)
        return fp32_to_e4m3(np.abs(scaled)) | sign, from_grid((1 / forward).astype(np.float32), n, k)

    def dequantize64(self, matrix: Matrix) -> NDArray[np.float64]:
        k = matrix.shape[1]
        assert matrix.scales is not None
        scales = np.ascontiguousarray(matrix.scales).view(np.float32).astype(np.float64)
        return E4M3[matrix.codes].astype(np.float64) * np.repeat(scales, _BLOCK, axis=1)[:, :k]

    def stored_scale_shapes(self, n: int, k: int, block: ScaleBlock | None) -> tuple[tuple[int, ...], ...]:
        grid = _grid_shape(n, k, block)
        shapes: list[tuple[int, ...]] = [grid]
        if grid[1] == 1 and block is not None and block[1] == 0:  # one for a row or for all: tools leave ones out
            shapes += [grid[:1], ()] if grid[0] == 1 else [grid[:1]]
        return tuple(shapes)

    def check_scale_block(self, k: int, block: ScaleBlock | None) -> None:
        _check_columns(_block(1, k, block)[1])

    def read_scales(self, stored: NDArray[Any], dtype: str) -> NDArray[np.uint32]:
        if dtype == "BF16":
            return stored.astype(np.uint32) << np.uint32(16)
        values = E8M0[stored] if dtype == "F8_E8M0" else np.ascontiguousarray(stored, np.float32)
        return values.view(np.uint32)

    def spread_scales(self, stored: Scales, n: int, k: int, block: ScaleBlock | None) -> NDArray[np.uint32]:
        return from_grid(_grid(stored, n, k, block), n, k, _block(n, k, block))

    def dequantize_stored(self, matrix: Matrix, stored: Scales | None, block: ScaleBlock | None) -> NDArray[np.float32]:
        assert stored is not None
        n, k = matrix.shape
        return E4M3[matrix.codes] * _expand(_grid(stored, n, k, block), n, k, _block(n, k, block))

    def find_bad(self, matrix: Matrix) -> str | None:
        assert matrix.scales is not None
        scales = np.ascontiguousarray(matrix.scales).view(np.float32)
        bad = np.flatnonzero(~((scales >= 0) & (scales <= _LARGEST)).all(axis=1))
        if bad.size:
            return f"row {bad[0]} has a block scale that is NaN, infinite, negative or too large for fp32 weights"
        if (matrix.codes << np.uint8(1)).max(initial=0) < 0xFE:
            return None
        bad = np.flatnonzero(((matrix.codes & 0x7F) == 0x7F).any(axis=1))
        return f"row {bad[0]} holds a NaN weight" if bad.size else None


def from_grid(
    grid: NDArray[np.float32], n: int, k: int, block: tuple[int, int] = (_BLOCK, _BLOCK)
) -> NDArray[np.uint32]:
    """Scales (N, ceil(K / 128)) of a matrix (n, k) from a checkpoint's fp32 grid, one scale per block (rows, columns).

    Any number of rows is legal, so is a number of columns that 128 divides or is divided by; in the latter case the
    scales that fall into one 128 must agree, because a record has one for them. Raises `FormatError` otherwise.
    """
    rows, columns = block
    if grid.shape != (-(-n // rows), -(-k // columns)):
        raise _grid_error(f"a grid of {grid.shape} scales does not cover ({n}, {k}) in blocks of {block}", n, k)
    _check_columns(columns)
    if columns < _BLOCK:
        share = _BLOCK // columns
        if not np.array_equal(grid, np.repeat(grid[:, ::share], share, axis=1)[:, : grid.shape[1]]):
            raise _grid_error(f"scales per {columns} columns differ inside its blocks of {_BLOCK}", n, k)
        by_block = grid[:, ::share]
    else:
        by_block = np.repeat(grid, columns // _BLOCK, axis=1)[:, : -(-k // _BLOCK)]
    return np.repeat(np.ascontiguousarray(by_block, np.float32).view(np.uint32), rows, axis=0)[:n]


def _block(n: int, k: int, block: ScaleBlock | None) -> tuple[int, int]:
    """Rows and columns that share a scale; a scale for all columns covers the whole blocks of a record."""
    rows, columns = (_BLOCK, _BLOCK) if block is None else block
    return rows or n, columns if 0 < columns < k else -(-k // _BLOCK) * _BLOCK


def _grid(stored: Scales, n: int, k: int, block: ScaleBlock | None) -> NDArray[np.float32]:
    return np.ascontiguousarray(stored).view(np.float32).reshape(_grid_shape(n, k, block))


def _grid_shape(n: int, k: int, block: ScaleBlock | None) -> tuple[int, int]:
    rows, columns = _block(n, k, block)
    return -(-n // rows), -(-k // columns)


def _expand(
    grid: NDArray[np.float32], n: int, k: int, block: tuple[int, int] = (_BLOCK, _BLOCK)
) -> NDArray[np.float32]:
    return np.repeat(np.repeat(grid, block[0], axis=0)[:n], block[1], axis=1)[:, :k]


def _check_columns(columns: int) -> None:
    if columns % _BLOCK and _BLOCK % columns:
        raise _grid_error(f"scale blocks of {columns} columns do not fit its blocks of {_BLOCK}")


def _grid_error(what: str, n: int = 0, k: int = 0) -> FormatError:
    return FormatError(f"fp8_block: {what}; such scales cannot be held in records", format="fp8_block", shape=(n, k))


FORMAT = FP8Block()
