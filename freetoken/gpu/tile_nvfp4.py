"""nvfp4: a dword holds eight e2m1 codes; a block's scale is e4m3.

Their product has at most six significant bits, so bf16 holds it exactly.
"""

import triton
import triton.language as tl

from freetoken.gpu.e2m1 import shrunken

FACTOR = 512.0
FOLDED = True


@triton.jit
def decode(dwords, i: tl.constexpr):
    """Code i of each dword as float32, times 2**-126: the scale brings it back."""
    return shrunken(dwords, i)


@triton.jit
def scale(bits):
    """e4m3 times 2**117 as float32; a weight is then an ordinary number, 2**-9 of what it stands for."""
    return ((bits.to(tl.int32) & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0**120 * 2.0**117
