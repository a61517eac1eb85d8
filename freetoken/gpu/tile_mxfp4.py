"""mxfp4 and ds_fp4: a dword holds eight e2m1 codes; a block's scale is a power of two.

A weight has two significant bits. Times 2**-3 all of them, from 0.5 * 2**-127 to 6 * 2**127, are bf16 numbers (the
smallest are subnormal), so their products with scales are exact.
"""

import triton
import triton.language as tl

from freetoken.gpu.e2m1 import shrunken

FACTOR = 8.0
FOLDED = True


@triton.jit
def decode(dwords, i: tl.constexpr):
    """Code i of each dword as float32."""
    return shrunken(dwords, i) * 2.0**126


@triton.jit
def scale(bits):
    """2**(bits - 130) as float32."""
    power = bits.to(tl.int32)
    return tl.where(power == 0, 0x00400000, power << 23).to(tl.float32, bitcast=True) * 0.125
