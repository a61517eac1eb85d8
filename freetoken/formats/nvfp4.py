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
from freetoken.formats.codes import E2M1, E4M3, fit_e2m1, fp32_to_e4m3, unpack_nibbles

_SMALLEST = np.float32(2.0**-117)
"""Global factors from here up: times e4m3's smallest scale of 2**-9 they are normal numbers, so steps divide safely."""
_E4M3_LARGEST = 0x7E
_LARGEST = float(np.finfo(np.float32).max)


class NVFP4(Format):
    """Value = e2m1 * e4m3 scale * global (or / global)."""

    name = "nvfp4"
    bits = 4
    block = 16
    scale_dtype = np.uint8
    scale_alarms = (0x7F, 0x80)
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
        """The factor with which block scales use all of e4m3's range, and no step is subnormal."""
        factor = np.float32(largest() / (6 * 448))
        return np.maximum(factor, _SMALLEST) if factor > 0 and np.isfinite(factor) else np.float32(1)

    def quantize_rows(
        self, weights: NDArray[np.float32], factor: np.float32
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Of three block scales the one with the smallest squared error; nearest codes under it.

        They are amax / 6, which ModelOpt and compressed-tensors take; amax / 4, whose codes lie closer near amax ("Four
        Over Six", arXiv:2512.02010); and the one below the first, which saturates amax and serves the others better.
        e4m3's largest scale is not lowered: so the result's own largest weight leads to the same global again, and
        values of this format that were quantized here stay as they are.
        """
        n, k = weights.shape
        blocks = np.ascontiguousarray(weights.reshape(-1, 16).T)
        peak = np.abs(blocks).max(axis=0) / factor
        six, four = (np.maximum(fp32_to_e4m3(peak / np.float32(code)), 1) for code in (6, 4))
        scales = np.stack([six, four, six - ((six > 1) & (six < _E4M3_LARGEST))])
        codes, best = fit_e2m1(blocks, E4M3[scales] * factor)
        return codes.reshape(n, k // 2), np.take_along_axis(scales, best[None], 0).reshape(n, k // 16)

    def dequantize64(self, matrix: Matrix) -> NDArray[np.float64]:
        n, k = matrix.shape
        assert matrix.scales is not None
        scales = E4M3[matrix.scales].astype(np.float64)[:, :, None]
        values = E2M1[unpack_nibbles(matrix.codes)].reshape(n, k // 16, 16) * scales
        factor = float(np.float32(matrix.global_scale))
        return (values / factor if matrix.divides else values * factor).reshape(n, k)

    def find_bad(self, matrix: Matrix) -> str | None:
        assert matrix.scales is not None
        bad_global = self.find_bad_global(matrix.global_scale, matrix.divides)
        if bad_global:
            return bad_global
        if matrix.scales.max(initial=0) < 0x7F:
            return None
        bad = np.flatnonzero(((matrix.scales & 0x7F) == 0x7F).any(axis=1))
        if bad.size:
            return f"row {bad[0]} has a NaN block scale"
        bad = np.flatnonzero((matrix.scales > 0x80).any(axis=1))
        return f"row {bad[0]} has a negative block scale" if bad.size else None

    def find_bad_global(self, factor: float, divides: bool) -> str | None:
        if not math.isfinite(factor) or factor <= 0:
            return f"its global scale is {factor}; a positive finite number is expected"
        if (1 / factor if divides else factor) * 6 * 448 > _LARGEST:
            return f"its global scale of {factor} makes weights that no fp32 holds"
        return None


FORMAT = NVFP4()
