"""ds_fp4 against transformers' own dequantization of what DeepSeek-V4 ships."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from freetoken import formats
from freetoken.formats import Matrix


def dequantize(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The stock operation, in fp32."""
    op = cast(Any, Fp8Dequantize(None))
    return cast(torch.Tensor, op._dequantize_one(weight, scales, output_dtype=torch.float32))


def test_ds_fp4_any_codes_and_scales() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (64, 128)).astype(np.uint8)
    scales = rng.integers(0, 252, (64, 8)).astype(np.uint8)  # above, 6 * 2**125 and more would not be fp32
    scales[0] = np.arange(8)
    theirs = dequantize(torch.from_numpy(codes.view(np.int8)), torch.from_numpy(scales).view(torch.float8_e8m0fnu))
    ours = Matrix(formats.get("ds_fp4"), codes, scales)
    np.testing.assert_array_equal(ours.dequantize(), theirs.numpy())
