"""q4_0: a dword holds eight codes with an offset of 8; a block's scale is fp16.

Their product, at most 15 bits, is rounded to bf16 for the tensor cores, which moves a matrix's output by 1.6e-3 of its
norm: far less than what the format has lost already.
"""

import triton
import triton.language as tl

FACTOR = 1.0
FOLDED = True


@triton.jit
def decode(dwords, i: tl.constexpr):
    """Code i of each dword as float32, exact: in the low bits of 2**23."""
    return (((dwords >> (4 * i)) & 0xF) | 0x4B000000).to(tl.float32, bitcast=True) - (2.0**23 + 8)


@triton.jit
def scale(bits):
    """float32 of fp16."""
    return bits.to(tl.float16, bitcast=True).to(tl.float32)
