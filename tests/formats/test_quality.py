"""Re-quantizing is as good as the tools that write checkpoints, on the very weights that they were given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from freetoken import formats
from freetoken.formats import Format, Matrix
from freetoken.formats.codes import E2M1, E4M3, E8M0, fit_e2m1, unpack_nibbles
from tests.support.oracle import Weights, dequantize_folder

NVFP4, MXFP4 = formats.get("nvfp4"), formats.get("mxfp4")

TOOLS = {  # what a tool wrote -> (the family of its source, our format, how much smaller our error is at least)
    "nvfp4-modelopt-qwen3moe": ("qwen3moe", NVFP4, 0.10),
    "nvfp4a16-modelopt-qwen3moe": ("qwen3moe", NVFP4, 0.10),
    "nvfp4-modelopt-mixtral": ("mixtral", NVFP4, 0.10),
    "nvfp4-modelopt-gptoss": ("gptoss", NVFP4, 0.10),
    "nvfp4-llmcompressor-qwen3moe": ("qwen3moe", NVFP4, 0.10),
    "nvfp4a16-llmcompressor-qwen3moe": ("qwen3moe", NVFP4, 0.10),
    "nvfp4a16-llmcompressor-deepseekv3": ("deepseekv3", NVFP4, 0.10),
    "mxfp4a16-llmcompressor-qwen3moe": ("qwen3moe", MXFP4, 0.0),
    "mxfp4a16-llmcompressor-gptoss": ("gptoss", MXFP4, 0.0),
    "fp4-deepseekv4-constructed": ("deepseekv4", formats.get("ds_fp4"), 0.0),
}
FP8 = ("fp8block-transformers-qwen3moe256", "fp8block-llmcompressor-qwen3moe256")
PUBLISHED = {"nvfp4": 0.095, "mxfp4": 0.112, "ds_fp4": 0.112, "q4_0": 0.088, "q8_0": 0.006}


def experts(weights: Weights) -> dict[str, NDArray[np.float32]]:
    """Matrices (N, K) of all experts; gpt-oss holds those of a layer as (E, K, N)."""
    found: dict[str, NDArray[np.float32]] = {}
    for name, weight in weights.items():
        if ".experts." in name and weight.ndim == 3 and "bias" not in name:
            found |= {f"{name}.{e}": one.T.float().numpy() for e, one in enumerate(weight)}
        elif ".experts." in name and weight.ndim == 2 and name.endswith(".weight"):
            found[name] = weight.float().numpy()
    return found


def norm(values: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))


def values(fmt: Format, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    return fmt.quantize(np.ascontiguousarray(weights)).dequantize()


@pytest.mark.parametrize("folder", TOOLS)
def test_no_matrix_is_worse_than_the_tools(folder: str, shared_dir: Path) -> None:
    family, fmt, gain = TOOLS[folder]
    source = experts(dequantize_folder(shared_dir / "checkpoints" / f"bf16-transformers-{family}"))
    written = experts(dequantize_folder(shared_dir / "checkpoints" / folder))
    assert source.keys() == written.keys()
    assert len(source) >= 24
    theirs = {name: norm(written[name] - weight) for name, weight in source.items()}
    ours = {name: norm(values(fmt, weight) - weight) for name, weight in source.items()}
    for name, weight in source.items():
        assert theirs[name] < 0.14 * norm(weight), "the tool's matrix is really that of these weights"
        assert ours[name] <= (1 - gain) * theirs[name], name


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("folder", FP8)
def test_error_from_fp8(folder: str, name: str, shared_dir: Path) -> None:
    """fp8 values are weights as good as any: all experts together keep the format's error."""
    source = experts(dequantize_folder(shared_dir / "checkpoints" / folder))
    assert len(source) == 48
    total = sum(norm(weights) ** 2 for weights in source.values())
    error = sum(norm(values(formats.get(name), weights) - weights) ** 2 for weights in source.values())
    assert (error / total) ** 0.5 <= PUBLISHED[name]


# --- against every scale there is -------------------------------------------------------------------------------------


def error_under(steps: NDArray[np.float64], blocks: NDArray[np.float32]) -> NDArray[np.float64]:
    """(C, M) squared errors of M blocks (M, B) of weights by their nearest codes under C steps (C, 1) or (C, M)."""
    grid = np.unique(E2M1).astype(np.float64)
    midpoints = (grid[1:] + grid[:-1]) / 2
    exact = blocks.astype(np.float64)
    errors = []
    for step in np.broadcast_to(steps, (len(steps), len(blocks))):
        nearest = grid[np.searchsorted(midpoints, exact / step[:, None])]
        errors.append(((nearest * step[:, None] - exact) ** 2).sum(axis=1))
    return np.array(errors)


def blocks_of(fmt: Format, weights: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """A matrix's blocks (M, B) and the squared errors (M,) that quantizing leaves them."""
    errors = (fmt.dequantize64(fmt.quantize(weights)) - weights) ** 2
    return weights.reshape(-1, fmt.block), errors.reshape(-1, fmt.block).sum(axis=1)


def heavy_tailed(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_t(4, (64, 512)).astype(np.float32)


def gaussian(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((64, 512)).astype(np.float32)


WEIGHTS = pytest.mark.parametrize("make", [gaussian, heavy_tailed])


@WEIGHTS
def test_mxfp4_is_the_best_there_is(make: Callable[[int], NDArray[np.float32]]) -> None:
    """No power of two leaves any block of these weights less: 0.1116 of gaussian ones is what mxfp4 can do."""
    blocks, ours = blocks_of(MXFP4, make(0))
    best = error_under(E8M0[90:150, None].astype(np.float64), blocks).min(axis=0)
    np.testing.assert_allclose(ours, best, rtol=1e-6)


@WEIGHTS
def test_nvfp4_is_near_the_best_there_is(make: Callable[[int], NDArray[np.float32]]) -> None:
    """Three scales come within 3 % of trying all 126; each block takes the best of its three."""
    weights = make(1)
    blocks, ours = blocks_of(NVFP4, weights)
    factor = np.float64(NVFP4.quantize(weights).global_scale)
    every = error_under(E4M3[1:127, None] * factor, blocks)
    assert (ours >= every.min(axis=0) * (1 - 1e-6)).all()
    assert np.sqrt(ours.sum() / every.min(axis=0).sum()) < 1.03

    def nearest_scale(wanted: NDArray[np.float64]) -> NDArray[np.intp]:
        return np.abs(E4M3[1:127, None] - wanted).argmin(axis=0)

    amax = np.abs(blocks).max(axis=1) / factor
    six, four = nearest_scale(amax / 6), nearest_scale(amax / 4)
    below = np.where(six < 125, six - 1, six)
    three = np.take_along_axis(every, np.stack([six, four, below]), 0)
    np.testing.assert_allclose(ours, three.min(axis=0), rtol=1e-5)
    assert all((three.argmin(axis=0) == i).mean() > 0.1 for i in range(3)), "each scale is the best of some blocks"


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=repr)
@pytest.mark.parametrize("make", [gaussian, heavy_tailed])
def test_values_of_a_format_stay(fmt: Format, make: Callable[[int], NDArray[np.float32]]) -> None:
    """What was quantized once and read is not changed by being quantized again, but for nvfp4's rounded global."""
    for seed in range(8):
        once = values(fmt, make(seed) * np.float32(1.1**seed))
        np.testing.assert_allclose(values(fmt, once), once, rtol=2**-22 if fmt is NVFP4 else 0, atol=0)


def test_nvfp4_keeps_the_largest_weight() -> None:
    """15 weights that suit a scale of 416 do not get it where the matrix's largest would shrink, and its global."""
    weights = gaussian(0)[:, :64] * np.float32(500)
    weights[5, 16:32] = 4 * 416
    weights[5, 20] = 6 * 448
    once = NVFP4.quantize(weights)
    assert once.global_scale == 1
    assert np.abs(once.dequantize()).max() == 6 * 448
    np.testing.assert_array_equal(values(NVFP4, once.dequantize()), once.dequantize())


def test_nvfp4_zeros_among_tiny_weights() -> None:
    """No step is zero, even where the whole matrix is subnormal."""
    weights = np.zeros((2, 32), np.float32)
    weights[1] = np.linspace(-1e-41, 1e-41, 32)
    result = values(NVFP4, weights)
    assert not result[0].any()
    assert np.abs(result).max() <= 1.5e-41


# --- the choice of a step ---------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), width=st.sampled_from([16, 32]), exponent=st.integers(-100, 100))
def test_fit_e2m1_takes_the_best_step(seed: int, width: int, exponent: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = np.ldexp(rng.standard_normal((20, width)), exponent).astype(np.float32)
    steps = np.ldexp(rng.uniform(0.05, 1.5, (4, 20)), exponent).astype(np.float32)
    errors = error_under(steps.astype(np.float64), blocks)
    packed, best = fit_e2m1(np.ascontiguousarray(blocks.T), steps)
    chosen = errors[best, np.arange(20)]
    np.testing.assert_allclose(chosen, errors.min(axis=0), rtol=1e-5)
    result = E2M1[unpack_nibbles(packed)].astype(np.float64) * steps[best, np.arange(20)].astype(np.float64)[:, None]
    np.testing.assert_allclose(((result - blocks) ** 2).sum(axis=1), chosen, rtol=1e-5)


def test_fit_e2m1_takes_the_first_of_equals() -> None:
    blocks = np.array([[0, 6, 4, 3, 2, 1]] * 16, np.float32)
    _, best = fit_e2m1(blocks, np.array([[1] * 6, [0.5] * 6, [1] * 6], np.float32))
    np.testing.assert_array_equal(best, [0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("name", formats.names())
def test_rows_are_quantized_alike_in_any_company(name: str) -> None:
    """A row's bits depend on its matrix's global and, for fp8_block, on its 128 rows; not on how many come at once."""
    fmt = formats.get(name)
    weights = np.random.default_rng(0).standard_normal((5 * fmt.row_group, fmt.block)).astype(np.float32)
    whole = fmt.quantize(weights)
    strips: list[Matrix] = []
    for start in range(0, len(weights), fmt.row_group):
        codes, scales = fmt.quantize_rows(weights[start : start + fmt.row_group], np.float32(whole.global_scale))
        strips.append(Matrix(fmt, codes, scales))
    np.testing.assert_array_equal(np.concatenate([strip.codes for strip in strips]), whole.codes)
    if whole.scales is not None:
        parts = [strip.scales for strip in strips if strip.scales is not None]
        np.testing.assert_array_equal(np.concatenate(parts), whole.scales)
