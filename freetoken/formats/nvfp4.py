"""nvfp4: e2m1 codes, one e4m3 scale per 16 weights along K, one fp32 global scale per matrix.

Two dialects of the same numbers: ModelOpt writes `weight_scale_2`, a factor; compressed-tensors writes
`weight_global_scale`, a divisor. The value is kept as it was given, with its direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from freetoken.formats.base import Format, Matrix, Spelling
from freetoken.formats.codes import E2M1, E4M3, fp32_to_e2m1, fp32_to_e4m3, pack_nibbles, unpack_nibbles


class NVFP4(Format):
    """Value = e2m1 * e4m3 scale * global (or / global)."""

    name = "nvfp4"
    bits = 4
    block = 16
    scale_dtype = np.uint8
    kernels = "nvfp4"
    spellings = (
        Spelling(
            "modelopt",
            {
                "codes": ("weight", ("U8",)),
                "scales": ("weight_scale", ("F8_E4M3",)),
                "global": ("weight_scale_2", ("F32",)),
            },
            optional=("input_scale",),
        ),
        Spelling(
            "compressed-tensors",
            {
                "codes": ("weight_packed", ("U8",)),
                "scales": ("weight_scale", ("F8_E4M3",)),
                "global": ("weight_global_scale", ("F32",)),
            },
            divides=True,
            optional=("input_global_scale",),
        ),
    )

    def choose_global(self, largest: Callable[[], float]) -> np.float32:
        """The factor with which block scales use all of e4m3's range."""
        factor = np.float32(largest() / (6 * 448))
        return factor if factor > 0 and np.isfinite(factor) else np.float32(1)

    def quantize_rows(
        self, weights: NDArray[np.float32], factor: np.float32
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Block scale amax/6, rounded to e4m3; nearest codes to the weights under the rounded scale."""
        n, k = weights.shape
        blocks = weights.reshape(n, k // 16, 16)
        amax = np.abs(blocks).max(axis=2)
        scales = fp32_to_e4m3((amax / np.float32(6) / factor).astype(np.float32))
        step = (E4M3[scales] * factor)[:, :, None]
        codes = fp32_to_e2m1(np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0))
        return pack_nibbles(codes.reshape(n, k)), scales

    def dequantize64(self, matrix: Matrix) -> NDArray[np.float64]:
        n, k = matrix.shape
        assert matrix.scales is not None
        scales = E4M3[matrix.scales].astype(np.float64)[:, :, None]
        values = E2M1[unpack_nibbles(matrix.codes)].reshape(n, k // 16, 16) * scales
        factor = float(np.float32(matrix.global_scale))
        return (values / factor if matrix.divides else values * factor).reshape(n, k)

    def find_bad(self, matrix: Matrix) -> str | None:
        assert matrix.scales is not None
        if not math.isfinite(matrix.global_scale) or matrix.global_scale <= 0:
            return f"its global scale is {matrix.global_scale}; a positive finite number is expected"
        factor = 1 / matrix.global_scale if matrix.divides else matrix.global_scale
        if factor * 6 * 448 > np.finfo(np.float32).max:
            return f"its global scale of {matrix.global_scale} makes weights that no fp32 holds"
        bad = np.flatnonzero(((matrix.scales & 0x7F) == 0x7F).any(axis=1))
        return f"row {bad[0]} has a NaN block scale" if bad.size else None


FORMAT = NVFP4()
