"""e2m1 codes of a dword, which several formats have."""

import triton
import triton.language as tl


@triton.jit
def shrunken(dwords, i: tl.constexpr):
    """Code i of each dword as float32, times 2**-126: its bits in place, exact, subnormal ones too."""
    high = dwords << (28 - 4 * i)
    return ((high >> 6) & -0x7E400000).to(tl.float32, bitcast=True)
