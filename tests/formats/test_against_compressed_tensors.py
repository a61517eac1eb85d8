"""nvfp4 and mxfp4 against compressed-tensors: what it packs is read as it reads it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from freetoken import formats
from freetoken.formats import Matrix

COMPRESSORS = {"nvfp4": NVFP4PackedCompressor, "mxfp4": MXFP4PackedCompressor}


def weights(n: int = 24, k: int = 128) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.randint(-3, 4, (n, 1), generator=generator))
    return torch.randn(n, k, generator=generator) * sizes * 0.02


def compress(name: str, weight: torch.Tensor, global_scale: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint of that scheme holds for one linear layer."""
    scheme = preset_name_to_scheme(f"{name}a16", ["Linear"])
    groups = weight.unflatten(1, (-1, scheme.weights.group_size))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, global_scale=global_scale)
    state = {"weight": weight, "weight_scale": scale}
    if global_scale is not None:
        state["weight_global_scale"] = global_scale
    return COMPRESSORS[name].compress(state, scheme)


def decompress(name: str, packed: dict[str, torch.Tensor]) -> torch.Tensor:
    return COMPRESSORS[name].decompress(packed, preset_name_to_scheme(f"{name}a16", ["Linear"]))["weight"]


def to_matrix(name: str, packed: dict[str, torch.Tensor]) -> Matrix:
    """The tensors as our spelling of the format names them."""
    fmt = formats.get(name)
    spelling = next(s for s in fmt.spellings if s.name == "compressed-tensors")
    tensors = {role: packed[suffix] for role, (suffix, _) in spelling.tensors.items()}
    codes, scales = (tensors[role].view(torch.uint8).numpy() for role in ("codes", "scales"))
    factor = float(tensors["global"]) if "global" in tensors else 1.0
    return Matrix(fmt, codes, scales, factor, spelling.divides)


@pytest.mark.parametrize("global_scale", [1.0, 512.0, 4096.0])
def test_nvfp4_values_equal_theirs(global_scale: float) -> None:
    """Where the global is a power of two their bfloat16 result is exact; ours must be the same values."""
    packed = compress("nvfp4", weights(), torch.tensor([global_scale]))
    matrix = to_matrix("nvfp4", packed)
    assert matrix.divides
    assert formats.get("nvfp4").find_bad(matrix) is None
    theirs = decompress("nvfp4", packed)
    assert theirs.dtype == torch.bfloat16
    np.testing.assert_array_equal(matrix.dequantize(), theirs.float().numpy())


def test_nvfp4_values_equal_theirs_with_their_own_global() -> None:
    """Any global, in float64: they divide the scale first, we divide last; fp32 rounds both to the same value."""
    weight = weights()
    packed = compress("nvfp4", weight, generate_gparam(weight.min(), weight.max()))
    matrix = to_matrix("nvfp4", packed)
    args = preset_name_to_scheme("nvfp4a16", ["Linear"]).weights
    theirs = dequantize(
        unpack_fp4_from_uint8(packed["weight_packed"], *weight.shape, dtype=torch.float64),
        packed["weight_scale"].double(),
        args=args,
        global_scale=packed["weight_global_scale"].double(),
        dtype=torch.float64,
    ).numpy()
    np.testing.assert_allclose(formats.get("nvfp4").dequantize64(matrix), theirs, rtol=1e-15, atol=0)
    np.testing.assert_array_equal(matrix.dequantize(), theirs.astype(np.float32))
    error = np.linalg.norm(theirs - weight.numpy()) / np.linalg.norm(weight.numpy())
    assert error < 0.12, "the global is really that of these weights"


def test_nvfp4_quantize_is_no_worse() -> None:
    weight = weights()
    packed = compress("nvfp4", weight, generate_gparam(weight.min(), weight.max()))
    values = weight.numpy()
    theirs = np.linalg.norm(to_matrix("nvfp4", packed).dequantize() - values)
    ours = np.linalg.norm(formats.get("nvfp4").quantize(values).dequantize() - values)
    assert ours <= theirs * 0.95


def test_mxfp4_values_equal_theirs() -> None:
    packed = compress("mxfp4", weights(), None)
    assert packed["weight_scale"].dtype == torch.uint8
    matrix = to_matrix("mxfp4", packed)
    assert formats.get("mxfp4").find_bad(matrix) is None
    np.testing.assert_array_equal(matrix.dequantize(), decompress("mxfp4", packed).float().numpy())


def test_mxfp4_quantize_is_no_worse() -> None:
    weight = weights()
    values = weight.numpy()
    theirs = np.linalg.norm(to_matrix("mxfp4", compress("mxfp4", weight, None)).dequantize() - values)
    assert np.linalg.norm(formats.get("mxfp4").quantize(values).dequantize() - values) <= theirs


@pytest.mark.parametrize("name", COMPRESSORS)
def test_any_codes_are_read_alike(name: str) -> None:
    """All nibbles at both places of a byte; scales that quantizing would not choose."""
    fmt = formats.get(name)
    rng = np.random.default_rng(0)
    codes = torch.from_numpy(rng.integers(0, 256, (16, 64)).astype(np.uint8))
    low, high = (0x01, 0x7F) if name == "nvfp4" else (10, 200)
    scales = torch.from_numpy(rng.integers(low, high, (16, 128 // fmt.block)).astype(np.uint8))
    packed = {"weight_packed": codes, "weight_scale": scales}
    if name == "nvfp4":
        packed["weight_scale"] = scales.view(torch.float8_e4m3fn)
        packed["weight_global_scale"] = torch.tensor([16.0])
    matrix = to_matrix(name, packed)
    np.testing.assert_array_equal(matrix.dequantize(), decompress(name, packed).float().numpy())
