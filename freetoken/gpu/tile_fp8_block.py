"""fp8_block: a dword holds four e4m3 codes; a block's scale is fp32.

The product of the two has more bits than bf16: sums over a block are scaled, so that weights stay exact.
"""

import triton
import triton.language as tl

FACTOR = 1.0
FOLDED = False


@triton.jit
def decode(dwords, i: tl.constexpr):
    """Code i of each dword as float32, exact: its bits in place are e4m3 times 2**-120, subnormal ones too."""
    high = dwords << (24 - 8 * i)
    return ((high >> 4) & -0x78100000).to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def scale(bits):
    """float32 of its bits."""
    return bits.to(tl.float32, bitcast=True)
