"""mxfp4: e2m1 codes, one e8m0 scale (a power of two) per 32 weights along K (OCP Microscaling Formats v1.0)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from freetoken.formats.base import Format, Matrix, Spelling
from freetoken.formats.codes import (
    E2M1,
    E8M0,
    E8M0_NAN,
    fit_e2m1,
    halves_to_pairs,
    split_blocks,
    unpack_nibbles,
)


class MXFP4(Format):
    """Value = e2m1 * 2**(scale - 127)."""

    name = "mxfp4"
    bits = 4
    block = 32
    scale_dtype = np.uint8
    scale_alarms = (E8M0_NAN,)
    kernels = "mxfp4"
    spellings: ClassVar[tuple[Spelling, ...]] = (
        Spelling(
            "compressed-tensors",
            {"codes": ("weight_packed", ("U8",)), "scales": ("weight_scale", ("U8", "F8_E8M0"))},
        ),
        Spelling("gpt-oss", {"codes": ("blocks", ("U8",)), "scales": ("scales", ("U8", "F8_E8M0"))}),
    )

    def quantize_rows(
        self, weights: NDArray[np.float32], factor: np.float32
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Per block the power of two with the smaller squared error: the one that saturates or the next one up.

        Nearest codes under it. OCP's rule and gguf's is the first alone. A higher one is never better, because all its
        codes in range are among these; a lower one only where a weight stands alone above others that are all tiny.
        """
        n, k = weights.shape
        blocks = np.ascontiguousarray(weights.reshape(-1, 32).T)
        amax = np.abs(blocks).max(axis=0)
        _, exponent = np.frexp(amax)  # amax = m * 2**exponent, m in [0.5, 1): floor(log2(amax)) = exponent - 1
        low = np.maximum(exponent - 1 - 2 + 127, 0)  # the largest code is 6 = 1.5 * 2**2
        scales = np.stack([low, low + 1])
        codes, best = fit_e2m1(blocks, E8M0[scales])
        chosen = np.take_along_axis(scales, best[None], 0)[0]
        chosen[amax == 0] = 127  # an all-zero block: scale 1
        return codes.reshape(n, k // 2), chosen.astype(np.uint8).reshape(n, k // 32)

    def dequantize64(self, matrix: Matrix) -> NDArray[np.float64]:
        n, k = matrix.shape
        assert matrix.scales is not None
        scales = E8M0[matrix.scales].astype(np.float64)[:, :, None]
        return (E2M1[unpack_nibbles(matrix.codes)].reshape(n, k // 32, 32) * scales).reshape(n, k)

    def find_bad(self, matrix: Matrix) -> str | None:
        assert matrix.scales is not None
        bad = np.flatnonzero((matrix.scales == E8M0_NAN).any(axis=1))
        return f"row {bad[0]} has a block scale of 255, which is NaN" if bad.size else None


def from_ggml_blocks(raw: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Codes (N, K / 2) and scales (N, K / 32) of rows of ggml's blocks, (N, 17 * K / 32) uint8: e8m0, then 16 bytes."""
    scales, packed = split_blocks(raw, 1, 16)
    return halves_to_pairs(packed).reshape(len(raw), -1), scales[:, :, 0]


FORMAT = MXFP4()
