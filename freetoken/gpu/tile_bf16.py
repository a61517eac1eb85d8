"""bf16: a dword holds two weights."""

import triton
import triton.language as tl

FACTOR = 1.0
"""What sums of products are multiplied with."""
FOLDED = True
"""Whether a weight times its scale is what the tensor cores multiply; else sums over a block are scaled."""


@triton.jit
def decode(dwords, i: tl.constexpr):
    """Weight i of each dword as float32, exact."""
    if i == 0:
        return (dwords << 16).to(tl.float32, bitcast=True)
    return (dwords & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def scale(bits):
    """There is none."""
    return bits
