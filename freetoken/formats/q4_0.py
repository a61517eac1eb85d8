"""q4_0: 4-bit codes with an offset of 8, one fp16 scale per 32 weights along K (ggml's block_q4_0, nibbles re-ordered).

ggml's byte j holds weights j and j + 16 of a block; here, as in every 4-bit format, byte j holds 2 j and 2 j + 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freetoken.formats.base import Format, Matrix
from freetoken.formats.codes import (
    FP16_ALARM,
    find_bad_fp16,
    halves_to_pairs,
    pack_nibbles,
    split_blocks,
    unpack_nibbles,
)


class Q4_0(Format):
    """Value = (code - 8) * fp16 scale; the scale may be negative."""

    name = "q4_0"
    bits = 4
    block = 32
    scale_dtype = np.uint16
    scale_alarms = (FP16_ALARM,)
    kernels = "q4_0"
    spellings = ()

    def quantize_rows(
        self, weights: NDArray[np.float32], factor: np.float32
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
        """As ggml: the weight of largest magnitude, with its sign, becomes code 0; fp16 scales saturate."""
        n, k = weights.shape
        blocks = weights.reshape(n, k // 32, 32)
        at = np.abs(blocks).argmax(axis=2)[:, :, None]
        scale = np.clip(np.take_along_axis(blocks, at, 2) / np.float32(-8), np.float32(-65504), np.float32(65504))
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.float32(1) / scale
        inverse[np.isinf(inverse)] = 0  # an all-zero block, or one whose fp16 scale is zero by far
        with np.errstate(over="ignore"):  # a scale that saturated
            codes = np.clip(np.trunc(blocks * inverse + np.float32(8.5)), 0, 15).astype(np.uint8)
        return pack_nibbles(codes.reshape(n, k)), scale[:, :, 0].astype(np.float16).view(np.uint16)

    def dequantize64(self, matrix: Matrix) -> NDArray[np.float64]:
        n, k = matrix.shape
        assert matrix.scales is not None
        codes = unpack_nibbles(matrix.codes).astype(np.float64) - 8
        scales = np.ascontiguousarray(matrix.scales).view(np.float16).astype(np.float64)
        return (codes.reshape(n, k // 32, 32) * scales[:, :, None]).reshape(n, k)

    def find_bad(self, matrix: Matrix) -> str | None:
        assert matrix.scales is not None
        return find_bad_fp16(matrix.scales)


def from_ggml_blocks(raw: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
    """Codes (N, K / 2) and scales (N, K / 32) of rows of ggml's blocks, (N, 18 * K / 32) uint8: fp16, then 16 bytes."""
    scales, packed = split_blocks(raw, 2, 16)
    return halves_to_pairs(packed).reshape(len(raw), -1), scales.view(np.uint16)[:, :, 0]


FORMAT = Q4_0()
