"""Small number types that formats are made of, as NumPy tables and functions: e2m1, e4m3, e8m0, bf16.

Sources: OCP Microscaling Formats v1.0 (e2m1, e8m0) and OCP 8-bit Floating Point v1.0 (e4m3). Everything here is
exact, but for the errors that `fit_e2m1` compares; edge codes are defined in this file only, and every kernel agrees
with it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Value of each 4-bit code; bit 3 is the sign. Doubled, all are small integers.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E8M0_NAN = 255
FP16_ALARM = 0x7C00
"""Bits that NaN and infinite fp16 have, all of them, and no other."""
_ONE, _E2M1_LARGEST = np.array([1, 6], np.float32).view(np.uint32)


def _e4m3_values() -> NDArray[np.float32]:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    value = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    value[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code & 0x80, -value, value).astype(np.float32)


E4M3 = _e4m3_values()
"""Value of each e4m3 code ("fn" variant: no infinities, 0x7f and 0xff are NaN)."""

E8M0 = np.concatenate([np.ldexp(1.0, np.arange(255) - 127), [np.nan]]).astype(np.float32)
"""Value of each e8m0 code: 2**(code - 127). Code 0 is 2**-127, an fp32 subnormal; 255 is NaN."""


def bf16_to_fp32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Exact fp32 values of bf16 bit patterns (uint16)."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bf16 bit patterns of fp32 values, rounded to nearest even; NaN stays a quiet NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def fp32_to_e2m1(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Nearest e2m1 codes (ties to the even code), saturating at 6; the sign of zero is kept positive."""
    magnitude = np.abs(values)
    # The code is the number of midpoints passed; an exact midpoint goes to the code with an even number.
    code = np.zeros(values.shape, np.uint8)
    for midpoint in (0.25, 1.25, 2.5, 5.0):
        code += magnitude > np.float32(midpoint)
    for midpoint in (0.75, 1.75, 3.5):
        code += magnitude >= np.float32(midpoint)
    code |= ((values < 0) & (code > 0)).view(np.uint8) << 3
    return code


def fit_e2m1(blocks: NDArray[np.float32], steps: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.intp]]:
    """Codes of M blocks of B weights, each under whichever of C steps leaves it the smallest squared error.

    blocks: (B, M), a block a column: NumPy is quickest along long rows. steps: (C, M), above 0; of equally good ones
    the first is taken. Returns the packed codes (M, B / 2) and the numbers (M,) of the steps.
    """
    magnitude = np.abs(blocks)
    errors = np.empty(steps.shape)
    for step, error in zip(steps, errors, strict=True):
        rest = magnitude / step
        capped = np.minimum(rest.view(np.uint32), _E2M1_LARGEST)  # numbers from 0 up are ordered as their bits are
        spacing = np.maximum(capped & np.uint32(0x7F800000), _ONE).view(np.float32) * np.float32(2.0**22)
        rest -= (capped.view(np.float32) + spacing) - spacing  # the sum has no bits below e2m1's: it rounds to them
        rest *= rest
        total = np.zeros_like(step)
        for row in rest:  # in this order however many blocks there are
            total += row
        error[...] = total * step.astype(np.float64) ** 2
    best = errors.argmin(axis=0)
    codes = fp32_to_e2m1(blocks / np.take_along_axis(steps, best[None], 0))
    return np.ascontiguousarray((codes[0::2] | (codes[1::2] << 4)).T), best


def fp32_to_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Nearest e4m3 codes of non-negative values (ties to even), saturating at 448."""
    values = np.fmin(values, np.float32(448))
    # Normal numbers: fp32's mantissa is rounded to 3 bits and the exponent's bias changed; below, steps are 2**-9.
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    normal = ((bits + (0x7FFFF + ((bits >> 20) & 1))) >> 20) - (120 << 3)
    return np.where(values < np.float32(2.0**-6), np.rint(values * np.float32(512)), normal).astype(np.uint8)


def pack_nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(..., K) 4-bit codes to (..., K/2) bytes; the low nibble is the even element."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(..., K/2) bytes to (..., K) 4-bit codes; the low nibble is the even element."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], packed.shape[-1] * 2)


def find_bad_fp16(scales: NDArray[np.generic]) -> str | None:
    """The first row of fp16 scales (N, blocks), given as bits, that holds a NaN or an infinity, in words; or None."""
    bits = np.ascontiguousarray(scales).view(np.uint16)
    bad = np.flatnonzero(((bits & FP16_ALARM) == FP16_ALARM).any(axis=1))
    return f"row {bad[0]} has a NaN or infinite block scale" if bad.size else None


def split_blocks(raw: NDArray[np.uint8], head: int, body: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Rows of blocks, each `head` bytes of scale and `body` bytes of codes, as (N, blocks, head) and (N, blocks, body).

    Both are copies. Raises ValueError when a row is not a whole number of blocks.
    """
    if raw.ndim != 2 or raw.shape[1] % (head + body):
        raise ValueError(f"shape {raw.shape} is not rows of whole blocks of {head + body} bytes")
    blocks = raw.reshape(len(raw), -1, head + body)
    return blocks[:, :, :head].copy(), blocks[:, :, head:].copy()


def halves_to_pairs(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(..., B/2) bytes of blocks of B codes as ggml packs them, byte j holding j and j + B/2, to low nibble = even."""
    even, odd = packed[..., 0::2], packed[..., 1::2]
    return np.concatenate([(even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)], axis=-1)
