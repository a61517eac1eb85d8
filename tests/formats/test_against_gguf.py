"""q4_0, q8_0 and mxfp4 against the gguf package's own blocks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import quants
from numpy.typing import NDArray

from freetoken import formats
from freetoken.formats import Matrix, mxfp4, q4_0, q8_0
from freetoken.formats.codes import unpack_nibbles
from tests.support.gguf import ggml_blocks

Q4_0, Q8_0, MXFP4 = formats.get("q4_0"), formats.get("q8_0"), formats.get("mxfp4")


def mxfp4_matrix(blocks: NDArray[np.uint8]) -> Matrix:
    return Matrix(MXFP4, *mxfp4.from_ggml_blocks(blocks))


def weights(n: int, k: int, seed: int = 0) -> NDArray[np.float32]:
    """Rows of very different sizes, some zero blocks."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((n, k)) * np.exp(rng.uniform(-6, 6, (n, 1)))
    values[0, :32] = 0
    return values.astype(np.float32)


def test_q8_0_quantize_bit_for_bit() -> None:
    values = weights(64, 256)
    np.testing.assert_array_equal(ggml_blocks(Q8_0.quantize(values)), quants.quantize(values, Type.Q8_0))


def test_q8_0_rounds_halves_as_ggml() -> None:
    """A block whose largest is 127 has scale 1: halves go away from zero, their lower neighbours do not."""
    halves = np.arange(-15.5, 16.5, dtype=np.float32)
    rows = np.stack([halves, np.nextafter(halves, np.float32(0)), np.nextafter(halves, 100 * halves), halves / 31])
    rows[:, 0] = 127
    np.testing.assert_array_equal(ggml_blocks(Q8_0.quantize(rows)), quants.quantize(rows, Type.Q8_0))
    codes = Q8_0.quantize(rows).codes.view(np.int8)
    np.testing.assert_array_equal(codes[0, 15:17], [-1, 1])
    np.testing.assert_array_equal(codes[1, 15:17], [0, 0])


def test_q8_0_small_blocks_bit_for_bit() -> None:
    """Scales that are fp16 subnormals, or zero in fp16."""
    values = np.ldexp(weights(16, 64, seed=1), -20).astype(np.float32)
    np.testing.assert_array_equal(ggml_blocks(Q8_0.quantize(values)), quants.quantize(values, Type.Q8_0))


def test_q8_0_dequantize_bit_for_bit() -> None:
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 256, (32, 128)).astype(np.uint8)
    scales = rng.integers(0, 0x7C00, (32, 4)).astype(np.uint16) | rng.integers(0, 2, (32, 4)).astype(np.uint16) << 15
    matrix = Matrix(Q8_0, codes, scales)
    np.testing.assert_array_equal(matrix.dequantize(), quants.dequantize(ggml_blocks(matrix), Type.Q8_0))
    back = q8_0.from_ggml_blocks(ggml_blocks(matrix))
    np.testing.assert_array_equal(back[0], codes)
    np.testing.assert_array_equal(back[1], scales)


def test_q4_0_quantize_bit_for_bit() -> None:
    values = np.concatenate([weights(64, 256), np.ldexp(weights(16, 256, seed=1), -20).astype(np.float32)])
    np.testing.assert_array_equal(ggml_blocks(Q4_0.quantize(values)), quants.quantize(values, Type.Q4_0))


def test_q4_0_rounds_halves_as_ggml() -> None:
    """A block whose largest is -8 has scale 1: halves go up, and what rounds to 8 saturates at 7."""
    halves = np.arange(-7.5, 8, dtype=np.float32)
    rows = np.stack([np.concatenate([halves, other]) for other in (np.nextafter(halves, np.float32(9)), halves / 3)])
    rows[:, 31] = -8
    for signed in (rows, -rows):
        np.testing.assert_array_equal(ggml_blocks(Q4_0.quantize(signed)), quants.quantize(signed, Type.Q4_0))
    np.testing.assert_array_equal(unpack_nibbles(Q4_0.quantize(rows).codes)[0, [0, 7, 8, 15, 31]], [1, 8, 9, 15, 0])


def test_q4_0_dequantize_bit_for_bit() -> None:
    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (32, 4, 18)).astype(np.uint8)
    blocks[:, :, 1] &= 0xBF  # scales of both signs without NaN and infinity; subnormal ones too
    raw = blocks.reshape(32, -1)
    matrix = Matrix(Q4_0, *q4_0.from_ggml_blocks(raw))
    np.testing.assert_array_equal(matrix.dequantize(), quants.dequantize(raw, Type.Q4_0))
    np.testing.assert_array_equal(ggml_blocks(matrix), raw)


@pytest.mark.parametrize("read", [q4_0.from_ggml_blocks, q8_0.from_ggml_blocks, mxfp4.from_ggml_blocks])
def test_rows_that_are_not_whole_blocks(read: Callable[[NDArray[np.uint8]], object]) -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 35\) is not rows of whole blocks"):
        read(np.zeros((2, 35), np.uint8))


def test_mxfp4_dequantize_exactly() -> None:
    """Any codes and scales from 2**-127 (byte 0) up to where fp32 ends; 255 is NaN here and not in gguf."""
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (64, 4 * 17)).astype(np.uint8)
    blocks[:, ::17] = np.arange(256).reshape(64, 4).clip(max=252)
    np.testing.assert_array_equal(mxfp4_matrix(blocks).dequantize(), quants.dequantize(blocks, Type.MXFP4))
    np.testing.assert_array_equal(ggml_blocks(mxfp4_matrix(blocks)), blocks)


def test_mxfp4_quantize_is_no_worse() -> None:
    """Block by block: gguf takes the scale that saturates, we the better of that and the next."""
    values = weights(64, 256)
    ours = MXFP4.dequantize64(MXFP4.quantize(values))
    theirs = quants.dequantize(quants.quantize(values, Type.MXFP4), Type.MXFP4).astype(np.float64)

    def error(result: NDArray[np.float64]) -> NDArray[np.float64]:
        return ((result - values).reshape(-1, 32) ** 2).sum(axis=1)

    assert (error(ours) <= error(theirs) * (1 + 1e-6)).all()
    assert error(ours / values.std()).sum() < np.inf
    assert np.mean(error(ours)[1:] < error(theirs)[1:]) > 0.1, "the other scale is better for some blocks"


def test_mxfp4_ours_reads_the_same_there() -> None:
    matrix = MXFP4.quantize(weights(8, 96))
    np.testing.assert_array_equal(quants.dequantize(ggml_blocks(matrix), Type.MXFP4), matrix.dequantize())
