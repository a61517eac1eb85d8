"""Small number types against torch's float8 and bfloat16, and against their definitions."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from freetoken.formats import codes
from freetoken.formats.codes import E2M1, E4M3, E8M0

ALL_BYTES = np.arange(256, dtype=np.uint8)


def torch_floats(bits: NDArray[np.generic], dtype: torch.dtype) -> NDArray[np.float32]:
    return torch.from_numpy(bits).view(dtype).float().numpy()


def midpoints(values: NDArray[np.floating]) -> NDArray[np.float64]:
    wide = values.astype(np.float64)
    return (wide[1:] + wide[:-1]) / 2


def around(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """The values and their neighbours in fp32 on both sides."""
    exact = values.astype(np.float32)
    np.testing.assert_array_equal(exact, values)
    return np.concatenate([exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))])


# --- tables -----------------------------------------------------------------------------------------------------------


def test_e2m1_table() -> None:
    """Sign, two bits of exponent with bias 1, one bit of mantissa; exponent 0 is subnormal."""
    for code in range(16):
        sign, exponent, mantissa = -1 if code & 8 else 1, code >> 1 & 3, code & 1
        value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        assert E2M1[code] == sign * value
        assert np.signbit(E2M1[code]) == (sign < 0)


def test_e4m3_table() -> None:
    wanted = torch_floats(ALL_BYTES, torch.float8_e4m3fn)
    np.testing.assert_array_equal(E4M3, wanted)
    np.testing.assert_array_equal(np.signbit(E4M3[[0, 0x80]]), [False, True])
    assert E4M3[0x7E] == 448


def test_e8m0_table() -> None:
    np.testing.assert_array_equal(E8M0, torch_floats(ALL_BYTES, torch.float8_e8m0fnu))
    np.testing.assert_array_equal(E8M0[[0, 127, 254]], np.ldexp(np.float32(1), [-127, 0, 127]))
    assert np.isnan(E8M0[codes.E8M0_NAN])


# --- rounding ---------------------------------------------------------------------------------------------------------


def nearest(value: float, table: NDArray[np.floating]) -> int:
    """The code of a sorted table nearest to a value, ties to the even code: the definition, slowly."""
    distance = np.abs(table.astype(np.float64) - value)
    best = np.flatnonzero(distance == distance.min())
    return int(best[0] if best.size == 1 or best[0] % 2 == 0 else best[1])


def test_e2m1_rounds_to_nearest_even() -> None:
    positive = np.concatenate([around(midpoints(E2M1[:8])), E2M1[:8], np.float32([5.5, 6.5, 7, 1e30, 1e-45])])
    wanted = np.array([nearest(float(min(v, 6)), E2M1[:8]) for v in positive])
    np.testing.assert_array_equal(codes.fp32_to_e2m1(positive), wanted)
    np.testing.assert_array_equal(codes.fp32_to_e2m1(-positive), np.where(wanted > 0, wanted | 8, 0))


def test_e2m1_midpoints_by_hand() -> None:
    values = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    np.testing.assert_array_equal(E2M1[codes.fp32_to_e2m1(values)], [0, 1, 1, 2, 2, 4, 4])
    np.testing.assert_array_equal(codes.fp32_to_e2m1(np.float32([-0.0, -0.1, np.inf, -np.inf])), [0, 0, 7, 15])


def test_e4m3_rounds_as_torch_does() -> None:
    table = E4M3[:0x7F]
    rng = np.random.default_rng(0)
    random = np.exp2(rng.uniform(-12, np.log2(448), 5000)).astype(np.float32)
    values = np.concatenate([around(midpoints(table)), table, random])
    values = values[values <= 448]
    wanted = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(codes.fp32_to_e4m3(values), wanted)


def test_e4m3_saturates() -> None:
    np.testing.assert_array_equal(codes.fp32_to_e4m3(np.float32([449, 464, 1e30, np.inf])), np.full(4, 0x7E))


def test_bf16_rounds_as_torch_does() -> None:
    edges = np.uint32([0, 0x8000, 0x7FFF, 0x8001, 0x18000, 0x17FFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000, 0x7FC12345])
    random = np.random.default_rng(0).integers(0, 2**32, 5000, dtype=np.uint32)
    values = np.concatenate([edges, edges | 0x80000000, random]).astype(np.uint32).view(np.float32)
    rounded = codes.fp32_to_bf16(values)
    wanted = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(rounded[number], wanted[number])
    assert np.isnan(codes.bf16_to_fp32(rounded[~number])).all()


def test_nan_with_a_low_payload_stays_nan() -> None:
    """Truncating or carrying would make an infinity or a zero of these."""
    bits = np.uint32([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF])
    np.testing.assert_array_equal(codes.fp32_to_bf16(bits.view(np.float32)) & 0x7FFF, np.full(4, 0x7FC0))


def test_bf16_is_exact_both_ways() -> None:
    bits = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    values = codes.bf16_to_fp32(bits)
    wanted = torch_floats(bits.view(np.int16), torch.bfloat16)
    np.testing.assert_array_equal(values.view(np.uint32), wanted.view(np.uint32))
    number = ~np.isnan(values)
    np.testing.assert_array_equal(codes.fp32_to_bf16(values[number]), bits[number])


# --- nibbles ----------------------------------------------------------------------------------------------------------


def test_low_nibble_is_the_even_element() -> None:
    np.testing.assert_array_equal(codes.pack_nibbles(np.uint8([1, 2, 3, 15])), [0x21, 0xF3])
    np.testing.assert_array_equal(codes.unpack_nibbles(np.uint8([[0x21], [0xF3]])), [[1, 2], [3, 15]])


@given(st.lists(st.integers(0, 15), min_size=2, max_size=40).filter(lambda v: len(v) % 2 == 0))
def test_nibbles_round_trip(values: list[int]) -> None:
    array = np.array(values, np.uint8)
    np.testing.assert_array_equal(codes.unpack_nibbles(codes.pack_nibbles(array)), array)
