"""Promises that every format keeps: how near quantize comes, how tiles are laid out, what is refused.

A new format adds its numbers to the tables below; everything else follows from `formats.names()`.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from freetoken import formats
from freetoken.errors import ConfigError, FormatError
from freetoken.formats import Format, Matrix, fp8_block
from freetoken.formats.codes import E4M3, E8M0

FORMATS = pytest.mark.parametrize("fmt", [formats.get(name) for name in formats.names()], ids=formats.names())

# Largest relative Frobenius error on gaussian weights. bf16: half a step is 2**-9, uniformly spread. q8_0: amax of 32
# gaussians is about 2.2, so a step is 2.2/127 and its error that over sqrt(12). The 4-bit ones are measured.
ERROR = {
    "bf16": 0.002,
    "ds_fp4": 0.112,
    "fp8_block": 0.0266,
    "mxfp4": 0.112,
    "nvfp4": 0.085,
    "q4_0": 0.088,
    "q8_0": 0.006,
}

LARGEST = dict.fromkeys(formats.names(), 3.4e38) | {"bf16": 3.38e38}
"""Weights up to which quantize gives finite values (bf16's own largest number is 3.3895e38)."""


def gaussian(n: int, k: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


def relative_error(matrix: Matrix, weights: NDArray[np.float32]) -> float:
    error = matrix.format.dequantize64(matrix) - weights
    return float(np.linalg.norm(error) / np.linalg.norm(weights.astype(np.float64)))


def random_matrix(fmt: Format, n: int, blocks: int, seed: int) -> Matrix:
    """Any bytes as codes and scales."""
    return random_of_width(fmt, n, blocks * fmt.block, seed)


def random_of_width(fmt: Format, n: int, k: int, seed: int) -> Matrix:
    rng, blocks = np.random.default_rng(seed), -(-k // fmt.block)
    codes = rng.integers(0, 256, (n, k * fmt.bits // 8)).astype(np.uint8)
    if fmt.scale_dtype is None:
        return Matrix(fmt, codes)
    return Matrix(fmt, codes, rng.integers(0, np.iinfo(fmt.scale_dtype).max, (n, blocks)).astype(fmt.scale_dtype))


def check_same(a: Matrix, b: Matrix) -> None:
    assert a.format is b.format
    np.testing.assert_array_equal(a.codes, b.codes)
    assert (a.scales is None) == (b.scales is None)
    if a.scales is not None:
        np.testing.assert_array_equal(a.scales, b.scales)
    assert (a.global_scale, a.divides) == (b.global_scale, b.divides)


# --- the registry -----------------------------------------------------------------------------------------------------


def test_names_are_the_formats() -> None:
    assert formats.names() == tuple(sorted(ERROR))
    assert all(formats.get(name).name == name for name in formats.names())
    assert repr(formats.get("bf16")) == "<format bf16>"


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(
        ConfigError, match="unknown expert format 'q9'; known formats: bf16, ds_fp4, fp8_block, mxfp4"
    ) as caught:
        formats.get("q9")
    assert caught.value.value == "q9"


# --- quantize and dequantize ------------------------------------------------------------------------------------------


@FORMATS
@pytest.mark.parametrize("size", [1.0, 1e-3, 300.0])
def test_error_on_gaussian_weights(fmt: Format, size: float) -> None:
    weights = gaussian(48, 640) * np.float32(size)
    matrix = fmt.quantize(weights)
    assert matrix.shape == weights.shape
    error = relative_error(matrix, weights)
    assert 0 < error <= ERROR[fmt.name]


@FORMATS
def test_quantized_values_stay(fmt: Format) -> None:
    """What a format holds, it finds again."""
    weights = fmt.quantize(gaussian(17, 4 * fmt.block)).dequantize()
    again = fmt.quantize(weights)
    if fmt.name in ("nvfp4", "fp8_block"):  # the global is rounded again; the scale is the reciprocal of a reciprocal
        np.testing.assert_allclose(again.dequantize(), weights, rtol=2**-22, atol=0)
    elif fmt.name == "q8_0":  # the scale is rounded to fp16 from amax/127 again
        np.testing.assert_allclose(again.dequantize(), weights, rtol=2**-10, atol=0)
    else:
        np.testing.assert_array_equal(again.dequantize(), weights)


@FORMATS
def test_blocks_are_scaled_alone(fmt: Format) -> None:
    """One huge weight spoils its own block only (nvfp4: within e4m3's range of scales)."""
    weights = gaussian(16, 4 * fmt.block)
    weights[3, fmt.block] = 500.0
    matrix = fmt.quantize(weights)
    others = np.ones_like(weights, bool)
    others[3, fmt.block : 2 * fmt.block] = False
    error = np.linalg.norm((matrix.dequantize() - weights)[others]) / np.linalg.norm(weights[others])
    assert error <= 1.1 * ERROR[fmt.name]
    assert abs(matrix.dequantize()[3, fmt.block] - 500) < 500 / 4


@FORMATS
def test_dequantize_is_the_exact_value_rounded(fmt: Format) -> None:
    matrix = fmt.quantize(gaussian(5, 2 * fmt.block))
    assert matrix.dequantize().dtype == np.float32
    np.testing.assert_array_equal(matrix.dequantize(), fmt.dequantize64(matrix).astype(np.float32))


@FORMATS
def test_signs_and_zeros(fmt: Format) -> None:
    weights = gaussian(16, 3 * fmt.block)
    weights[:, fmt.block : 2 * fmt.block] = 0
    weights[7] = 0
    values, flipped = fmt.quantize(weights).dequantize(), fmt.quantize(-weights).dequantize()
    assert not values[weights == 0].any()
    np.testing.assert_array_equal(values, -flipped)
    assert ((values == 0) | (np.signbit(values) == np.signbit(weights))).all()


@FORMATS
def test_zero_matrix(fmt: Format) -> None:
    matrix = fmt.quantize(np.zeros((3, fmt.block), np.float32))
    assert not matrix.dequantize().any()
    assert fmt.find_bad(matrix) is None


@FORMATS
@pytest.mark.parametrize("size", [1e-45, 1e-41, 2e-38, 1e-30, 1e-9, 1e5, 1e7, 1e20, 1e38, np.inf])
def test_huge_and_tiny_weights_stay_numbers(fmt: Format, size: float) -> None:
    largest = LARGEST[fmt.name]
    unit = np.random.default_rng(0).uniform(-1, 1, (4, 2 * fmt.block))
    unit[0, 0] = 1
    weights = (unit * min(size, largest)).astype(np.float32)
    matrix = fmt.quantize(weights)
    values = fmt.dequantize64(matrix)
    assert np.isfinite(values).all()
    assert fmt.find_bad(matrix) is None
    assert np.abs(values).max() <= 1.5 * float(np.abs(weights).max())
    if fmt.scale_dtype is not np.uint16 and size >= 1e-30:  # fp16 scales end at 6e-8 and 65504
        assert relative_error(matrix, weights) < 0.15
    if fmt.scale_dtype is np.uint16 and size == 1e38:
        assert np.abs(values).max() == {"q4_0": 8, "q8_0": 127}[fmt.name] * 65504, "saturates"


# --- tiles ------------------------------------------------------------------------------------------------------------


@FORMATS
@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 50), steps=st.integers(1, 100), seed=st.integers(0, 2**32 - 1))
def test_pack_and_unpack_any_bytes(fmt: Format, n: int, steps: int, seed: int) -> None:
    k = fmt.width_step * (steps if fmt.ragged else 1 + steps // 25)
    matrix = random_of_width(fmt, n, k, seed)
    tiles = fmt.pack(matrix)
    assert tiles.shape == (-(-n // 16), fmt.tile_bytes(k))
    if k % fmt.block == 0:
        assert fmt.tile_bytes(k) == k // fmt.block * fmt.block_bytes
    check_same(fmt.unpack(tiles, n, k), matrix)


@FORMATS
@pytest.mark.parametrize("n", [1, 15, 16, 33])
def test_every_byte_has_its_place(fmt: Format, n: int) -> None:
    """The definition of a tile, byte by byte: docs and kernels rely on nothing else."""
    matrix = random_matrix(fmt, n, 3, seed=n)
    tiles = fmt.pack(matrix).reshape(-1, 3, fmt.block_bytes)
    row_bytes = fmt.block * fmt.bits // 8
    wanted = np.zeros_like(tiles)
    for row in range(n):
        tile, lane = divmod(row, 16)
        for block in range(3):
            if matrix.scales is not None:
                scale = np.frombuffer(matrix.scales[row, block].tobytes(), np.uint8)
                wanted[tile, block, lane * len(scale) : (lane + 1) * len(scale)] = scale
            for j in range(row_bytes):
                at = 16 * fmt.scale_bytes + 64 * (j // 4) + 4 * lane + j % 4
                wanted[tile, block, at] = matrix.codes[row, block * row_bytes + j]
    np.testing.assert_array_equal(tiles, wanted)


def test_a_ragged_block_is_a_shorter_block() -> None:
    fmt = formats.get("fp8_block")
    matrix = random_of_width(fmt, 20, 128 + 12, seed=0)
    tiles = fmt.pack(matrix)
    assert tiles.shape == (2, 64 + 32 * 64 + 64 + 3 * 64)
    np.testing.assert_array_equal(tiles[:, :2112], fmt.pack(matrix.columns(0, 128)))
    np.testing.assert_array_equal(tiles[:, 2112:], fmt.pack(matrix.columns(128, 140)))


@FORMATS
def test_slices_pack_like_copies(fmt: Format) -> None:
    """Shards hand over slices, which are not contiguous."""
    matrix = random_matrix(fmt, 40, 4, seed=1)
    part = matrix.rows(16, 35).columns(fmt.block, 3 * fmt.block)
    copy = Matrix(fmt, part.codes.copy(), None if part.scales is None else part.scales.copy())
    np.testing.assert_array_equal(fmt.pack(part), fmt.pack(copy))
    check_same(fmt.unpack(fmt.pack(part), 19, 2 * fmt.block), copy)


@FORMATS
def test_rows_and_columns_are_those_of_the_values(fmt: Format) -> None:
    matrix = fmt.quantize(gaussian(20, 4 * fmt.block))
    values = matrix.dequantize()
    np.testing.assert_array_equal(matrix.rows(3, 17).dequantize(), values[3:17])
    part = matrix.columns(fmt.block, 3 * fmt.block)
    assert part.shape == (20, 2 * fmt.block)
    np.testing.assert_array_equal(part.dequantize(), values[:, fmt.block : 3 * fmt.block])


@FORMATS
def test_columns_do_not_cut_blocks(fmt: Format) -> None:
    matrix = fmt.quantize(gaussian(2, 2 * fmt.block))
    for start, stop in ((1, fmt.block), (0, fmt.block + 1)):
        with pytest.raises(FormatError, match=f"{fmt.name}: columns {start}:{stop} cut a block of {fmt.block}"):
            matrix.columns(start, stop)


# --- widths -----------------------------------------------------------------------------------------------------------


def test_bf16_takes_88() -> None:
    """The odd width of a real model: 44 lines, 5.5 tiles."""
    fmt, weights = formats.get("bf16"), gaussian(88, 88)
    matrix = fmt.quantize(weights)
    assert relative_error(matrix, weights) <= ERROR["bf16"]
    assert fmt.pack(matrix).shape == (6, 44 * 64)
    check_same(fmt.unpack(fmt.pack(matrix), 88, 88), matrix)


def test_fp8_block_takes_88_and_2880() -> None:
    """Ragged last blocks of 88 and 64 weights."""
    fmt = formats.get("fp8_block")
    for k in (88, 2880):
        weights = gaussian(88, k)
        matrix = fmt.quantize(weights)
        assert matrix.shape == (88, k)
        assert matrix.scales is not None and matrix.scales.shape == (88, -(-k // 128))
        assert relative_error(matrix, weights) <= 1.02 * ERROR["fp8_block"]


@FORMATS
def test_other_widths_are_refused_by_name(fmt: Format) -> None:
    step = fmt.width_step
    unit = "4 weights of a line" if fmt.ragged else f"block of {fmt.block}"
    for k in (0, 1, step - 1, step + 1, 5 * step // 2 * 2 - 1):
        with pytest.raises(FormatError, match=f"{fmt.name}: the input dimension is {k}, .* {unit}") as e:
            fmt.quantize(np.zeros((2, k), np.float32))
        assert e.value.format == fmt.name


@FORMATS
def test_sizes(fmt: Format) -> None:
    assert fmt.line_k * fmt.bits == 32
    assert fmt.block % fmt.line_k == 0
    assert fmt.block_bytes * 8 == 16 * (fmt.block * fmt.bits + 8 * fmt.scale_bytes)
    assert fmt.granule % 16 == 0
    assert fmt.granule % fmt.block == 0


# --- scales that are no numbers ---------------------------------------------------------------------------------------

BAD_SCALES = {
    "ds_fp4": ([255], [0, 1, 254]),
    "fp8_block": (
        [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x7F7FFFFF, 0x80000001, 0xBF800000],
        [0, 1, 0x3F800000, 0x7B124924, 0x80000000],
    ),
    "mxfp4": ([255], [0, 1, 254]),
    "nvfp4": ([0x7F, 0xFF, 0x81, 0xFE], [0, 1, 0x7E, 0x80]),
    "q4_0": ([0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF], [0, 1, 0x7BFF, 0x8000, 0xFBFF]),
    "q8_0": ([0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF], [0, 1, 0x7BFF, 0x8000, 0xFBFF]),
}


@pytest.mark.parametrize("name", BAD_SCALES)
def test_find_bad_scales(name: str) -> None:
    fmt = formats.get(name)
    bad, good = BAD_SCALES[name]
    for scale in [*bad, *good]:
        matrix = fmt.quantize(gaussian(9, 3 * fmt.block))
        assert matrix.scales is not None
        matrix.scales[6, 2] = scale
        message = fmt.find_bad(matrix)
        if scale in bad:
            assert message is not None
            assert message.startswith("row 6 ")
            if "negative" not in message:
                with np.errstate(invalid="ignore"):
                    assert not np.isfinite(fmt.dequantize64(matrix)[6, 2 * fmt.block :]).all()
        else:
            assert message is None


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_find_bad_fp8_code(code: int) -> None:
    fmt = formats.get("fp8_block")
    matrix = fmt.quantize(gaussian(9, 140))
    assert fmt.find_bad(matrix) is None
    matrix.codes[4, 139] = code
    assert fmt.find_bad(matrix) == "row 4 holds a NaN weight"
    assert fmt.find_bad(Matrix(fmt, matrix.codes[:, :0], matrix.scales)) is None, "scales can be checked alone"


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, -np.inf])
def test_find_bad_global(value: float) -> None:
    fmt = formats.get("nvfp4")
    plain = fmt.quantize(gaussian(2, 16))
    message = fmt.find_bad(Matrix(fmt, plain.codes, plain.scales, value))
    assert message is not None
    assert f"global scale is {value}" in message


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF])
def test_find_bad_bf16(bits: int) -> None:
    fmt = formats.get("bf16")
    matrix = fmt.quantize(gaussian(5, 6))
    assert fmt.find_bad(matrix) is None
    matrix.codes.view(np.uint16)[4, 5] = bits
    assert fmt.find_bad(matrix) == "row 4 holds a NaN or infinite weight"
    matrix.codes.view(np.uint16)[4, 5] = 0x7F7F
    assert fmt.find_bad(matrix) is None


# --- values by hand ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mxfp4", "ds_fp4"])
def test_mxfp4_value(name: str) -> None:
    fmt = formats.get(name)
    codes = np.full((1, 16), 0xF1, np.uint8)  # 0.5 at even k, -6 at odd
    for scale in (0, 1, 126, 127, 128, 250):
        values = fmt.dequantize64(Matrix(fmt, codes, np.uint8([[scale]])))
        np.testing.assert_array_equal(values[0, :2], np.array([0.5, -6]) * float(E8M0[scale]))


@pytest.mark.parametrize("divides", [False, True])
def test_nvfp4_value(divides: bool) -> None:
    fmt = formats.get("nvfp4")
    codes = np.full((1, 8), 0xF1, np.uint8)
    for scale in (0, 1, 7, 8, 0x38, 0x7E, 0x81):
        values = fmt.dequantize64(Matrix(fmt, codes, np.uint8([[scale]]), 4.0, divides))
        factor = 0.25 if divides else 4.0
        np.testing.assert_array_equal(values[0, :2], np.array([0.5, -6]) * float(E4M3[scale]) * factor)


def test_q8_0_value() -> None:
    fmt = formats.get("q8_0")
    codes = np.full((1, 32), -128, np.int8).view(np.uint8)
    for half in (np.float16(2**-24), np.float16(0.1), np.float16(65504), np.float16(-3)):
        values = fmt.dequantize64(Matrix(fmt, codes, half.reshape(1, 1).view(np.uint16)))
        np.testing.assert_array_equal(values, np.full((1, 32), -128 * float(half)))


def test_q4_0_value() -> None:
    fmt = formats.get("q4_0")
    codes = np.full((1, 16), 0xF3, np.uint8)  # -5 at even k, 7 at odd
    for half in (np.float16(2**-24), np.float16(0.1), np.float16(65504), np.float16(-3)):
        values = fmt.dequantize64(Matrix(fmt, codes, half.reshape(1, 1).view(np.uint16)))
        np.testing.assert_array_equal(values, np.tile([-5, 7], (1, 16)) * float(half))


def test_ds_fp4_is_mxfp4_by_another_name() -> None:
    weights = gaussian(20, 96)
    ours, theirs = formats.get("ds_fp4").quantize(weights), formats.get("mxfp4").quantize(weights)
    assert ours.scales is not None and theirs.scales is not None
    np.testing.assert_array_equal(ours.codes, theirs.codes)
    np.testing.assert_array_equal(ours.scales, theirs.scales)
    np.testing.assert_array_equal(ours.format.pack(ours), theirs.format.pack(theirs))
    assert ours.format.kernels == theirs.format.kernels


def test_fp8_block_value() -> None:
    fmt = formats.get("fp8_block")
    codes = np.arange(256, dtype=np.uint8)[None, :]
    codes[codes & 0x7F == 0x7F] = 0
    for low, high in ((0.1, -3.0), (2.0**-149, 3e38)):
        scales = np.array([[low, high]], np.float32)
        values = fmt.dequantize64(Matrix(fmt, codes, scales.view(np.uint32)))
        np.testing.assert_array_equal(values, E4M3[codes].astype(np.float64) * np.repeat(scales, 128, 1))


# --- grids of fp8 scales ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(128, 128), (64, 128), (1, 256), (200, 384), (3, 128)])
def test_grid_is_a_scale_for_each_weight(block: tuple[int, int]) -> None:
    n, k = 200, 300
    shape = -(-n // block[0]), -(-k // block[1])
    grid = np.random.default_rng(0).uniform(1, 2, shape).astype(np.float32)
    scales = fp8_block.from_grid(grid, n, k, block)
    assert scales.shape == (200, 3)
    wanted = np.repeat(np.repeat(grid, block[0], 0)[:n], block[1], 1)[:, :k]
    np.testing.assert_array_equal(np.repeat(scales.view(np.float32), 128, 1)[:, :k], wanted)


def test_grid_of_64_columns_only_where_neighbours_agree() -> None:
    grid = np.array([[1, 1, 3, 3, 5], [2, 2, 4, 4, 6]], np.float32)
    scales = fp8_block.from_grid(grid, 100, 64 * 5, (64, 64))
    np.testing.assert_array_equal(scales[[0, 63, 64, 99]].view(np.float32), [[1, 3, 5]] * 2 + [[2, 4, 6]] * 2)
    grid[1, 3] = 7
    with pytest.raises(FormatError, match="fp8_block: scales per 64 columns differ inside its blocks of 128"):
        fp8_block.from_grid(grid, 100, 64 * 5, (64, 64))


def test_grids_that_do_not_fit() -> None:
    with pytest.raises(FormatError, match=r"a grid of \(2, 2\) scales does not cover \(128, 256\)"):
        fp8_block.from_grid(np.ones((2, 2), np.float32), 128, 256)
    with pytest.raises(FormatError, match="scale blocks of 96 columns do not fit"):
        fp8_block.from_grid(np.ones((1, 2), np.float32), 128, 192, (128, 96))
