"""q8_0: int8 codes, one fp16 scale per 32 weights along K (ggml's block_q8_0, here without its interleaving)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freetoken.formats.base import Format, Matrix
from freetoken.formats.codes import FP16_ALARM, find_bad_fp16, split_blocks


class Q8_0(Format):
    """Value = int8 * fp16 scale."""

    name = "q8_0"
    bits = 8
    block = 32
    scale_dtype = np.uint16
    scale_alarms = (FP16_ALARM,)
    kernels = "q8_0"
    spellings = ()

    def quantize_rows(
        self, weights: NDArray[np.float32], factor: np.float32
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
        """Scale amax/127, stored as fp16 (saturating); codes from the unrounded scale, halves away from 0, as ggml."""
        n, k = weights.shape
        blocks = weights.reshape(n, k // 32, 32)
        scale = np.minimum(np.abs(blocks).max(axis=2) / np.float32(127), np.float32(65504))
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.float32(1) / scale
        inverse[np.isinf(inverse)] = 0  # an all-zero block, or one whose fp16 scale is zero by far
        scaled = blocks * inverse[:, :, None]
        magnitude = np.abs(scaled)
        whole = np.floor(magnitude)  # adding a half first would round the float just below it up
        codes = np.copysign(np.minimum(whole + (magnitude - whole >= 0.5), 127), scaled).astype(np.int8)
        stored = scale.astype(np.float16).view(np.uint16)
        return codes.reshape(n, k).view(np.uint8), stored

    def dequantize64(self, matrix: Matrix) -> NDArray[np.float64]:
        n, k = matrix.shape
        assert matrix.scales is not None
        codes = np.ascontiguousarray(matrix.codes).view(np.int8).astype(np.float64)
        scales = np.ascontiguousarray(matrix.scales).view(np.float16).astype(np.float64)
        return (codes.reshape(n, k // 32, 32) * scales[:, :, None]).reshape(n, k)

    def find_bad(self, matrix: Matrix) -> str | None:
        assert matrix.scales is not None
        return find_bad_fp16(matrix.scales)


def from_ggml_blocks(raw: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
    """Codes (N, K) and scales (N, K / 32) of rows of ggml's blocks, (N, 34 * K / 32) uint8: fp16, then 32 codes."""
    scales, codes = split_blocks(raw, 2, 32)
    return codes.reshape(len(raw), -1), scales.view(np.uint16)[:, :, 0]


FORMAT = Q8_0()
