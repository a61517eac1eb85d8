"""q8_0: a dword holds four int8 codes; a block's scale is fp16.

Their product is rounded to bf16 for the tensor cores, as q4_0's is.
"""

import triton
import triton.language as tl

FACTOR = 1.0
FOLDED = True


@triton.jit
def decode(dwords, i: tl.constexpr):
    """Code i of each dword as float32, exact: with its offset of 128 in the low bits of 2**23, less both."""
    raised = dwords ^ -0x7F7F7F80
    return (((raised >> (8 * i)) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - (2.0**23 + 128)


@triton.jit
def scale(bits):
    """float32 of fp16."""
    return bits.to(tl.float16, bitcast=True).to(tl.float32)
