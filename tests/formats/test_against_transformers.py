"""ds_fp4 and fp8_block against transformers' own operations on what DeepSeek-V4, DeepSeek-V3 and others ship."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from freetoken import formats
from freetoken.formats import Matrix, fp8_block
from freetoken.kernels import reference

stock_fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
for _name in ("Fp8Dequantize", "Fp8Quantize", "_dequantize_fp8_weight"):
    if not hasattr(stock_fp8, _name) or not hasattr(stock_fp8.Fp8Dequantize, "_dequantize_one"):
        pytest.skip(f"this transformers has no {_name} of the kind compared with", allow_module_level=True)

FP8 = formats.get("fp8_block")


def dequantize(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The stock operation, in fp32."""
    op = cast(Any, stock_fp8.Fp8Dequantize(None))
    return cast(torch.Tensor, op._dequantize_one(weight, scales, output_dtype=torch.float32))


def quantize(
    weight: torch.Tensor, scale_fmt: str = "float", block: tuple[int, int] = (128, 128)
) -> tuple[torch.Tensor, torch.Tensor]:
    config = SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
    op = cast(Any, stock_fp8.Fp8Quantize(SimpleNamespace(quantization_config=config)))
    found = op._quantize_one("x.weight", weight)
    return found["x.weight"], found["x.weight_scale_inv"]


def weights(n: int, k: int) -> torch.Tensor:
    """Blocks of different sizes, one of them zero, with some weights that become e4m3 subnormals or zeros."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(n, k, generator=generator) * torch.exp2(torch.randint(-4, 5, (n, 1), generator=generator))
    values[::7, ::5] *= 1e-4
    values[:128, :128] = 0
    return values * 0.02


def any_codes(n: int, k: int) -> NDArray[np.uint8]:
    codes = np.random.default_rng(1).integers(0, 256, (n, k)).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0x81
    return codes


def test_ds_fp4_any_codes_and_scales() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (64, 128)).astype(np.uint8)
    scales = rng.integers(0, 252, (64, 8)).astype(np.uint8)  # above, 6 * 2**125 and more would not be fp32
    scales[0] = np.arange(8)
    theirs = dequantize(torch.from_numpy(codes.view(np.int8)), torch.from_numpy(scales).view(torch.float8_e8m0fnu))
    ours = Matrix(formats.get("ds_fp4"), codes, scales)
    np.testing.assert_array_equal(ours.dequantize(), theirs.numpy())


def test_activations_rounded_to_fp8() -> None:
    """Rows in blocks of (1, 128) with ue8m0 scales are what DeepSeek-V4's activations become."""
    values = weights(256, 2048)
    codes, scales = quantize(values, "ue8m0", (1, 128))
    theirs = codes.double().unflatten(-1, (-1, 128)) * scales.double()[..., None]
    np.testing.assert_array_equal(reference.round_fp8(values.double().numpy()), theirs.flatten(-2).numpy())


def test_fp8_block_quantize_bit_for_bit() -> None:
    values = weights(2176, 2048)  # many blocks: one reciprocal in ten rounds otherwise than the quotient
    codes, scales = quantize(values)
    ours = FP8.quantize(values.numpy())
    np.testing.assert_array_equal(ours.codes, codes.view(torch.uint8).numpy())
    np.testing.assert_array_equal(ours.scales, fp8_block.from_grid(scales.numpy(), 2176, 2048))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_block_dequantizes_a_whole_grid(dtype: torch.dtype) -> None:
    codes, scales = quantize(weights(384, 256), "ue8m0" if dtype == torch.float8_e8m0fnu else "float")
    scales = scales.to(dtype)
    ours = Matrix(FP8, codes.view(torch.uint8).numpy(), fp8_block.from_grid(scales.float().numpy(), 384, 256))
    np.testing.assert_array_equal(ours.dequantize(), dequantize(codes, scales).numpy())


@pytest.mark.parametrize(("n", "k"), [(88, 2880), (2880, 88), (200, 300), (128, 4)])
def test_fp8_block_dequantizes_a_ragged_grid(n: int, k: int) -> None:
    """Any codes; the stock operation for whole grids refuses these, the one of its fp8 layers cuts them."""
    codes = any_codes(n, k)
    shape = -(-n // 128), -(-k // 128)
    grid = np.random.default_rng(2).uniform(1e-5, 1e-3, shape).astype(np.float32)
    stock = cast(Any, stock_fp8._dequantize_fp8_weight)
    theirs = stock(torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(grid), (128, 128), torch.float32)
    ours = Matrix(FP8, codes, fp8_block.from_grid(grid, n, k))
    np.testing.assert_array_equal(ours.dequantize(), theirs.numpy())


def test_fp8_block_values_are_torchs() -> None:
    codes = any_codes(256, 128)
    ours = Matrix(FP8, codes, np.ones((256, 1), np.float32).view(np.uint32))
    np.testing.assert_array_equal(ours.dequantize(), torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy())
