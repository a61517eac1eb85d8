"""bf16: plain bfloat16 weights, no scales. Also what fp16 and fp32 checkpoints are rounded to."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freetoken.formats.base import Format, Matrix, Spelling
from freetoken.formats.codes import bf16_to_fp32, fp32_to_bf16


class BF16(Format):
    """A code is a bf16 bit pattern; a line holds 2 weights of 16 rows."""

    name = "bf16"
    bits = 16
    block = 2
    scale_dtype = None
    code_alarm = 0x7F80
    kernels = "bf16"
    spellings = (Spelling("plain", {"codes": ("weight", ("BF16", "F16", "F32"))}),)

    def quantize_rows(self, weights: NDArray[np.float32], factor: np.float32) -> tuple[NDArray[np.uint8], None]:
        """Round to nearest even."""
        return fp32_to_bf16(weights).view(np.uint8), None

    def dequantize64(self, matrix: Matrix) -> NDArray[np.float64]:
        return self.dequantize32(matrix).astype(np.float64)

    def dequantize32(self, matrix: Matrix) -> NDArray[np.float32]:
        return bf16_to_fp32(np.ascontiguousarray(matrix.codes).view(np.uint16))

    def find_bad(self, matrix: Matrix) -> str | None:
        bits = np.ascontiguousarray(matrix.codes).view(np.uint16)
        if (bits << np.uint16(1)).max(initial=0) < 0xFF00:  # without the sign; loading is only as quick as this
            return None
        bad = np.flatnonzero(((bits & 0x7F80) == 0x7F80).any(axis=1))
        return f"row {bad[0]} holds a NaN or infinite weight" if bad.size else None


FORMAT = BF16()
