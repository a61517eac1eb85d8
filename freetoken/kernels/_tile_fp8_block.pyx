"""The CPU tiles of fp8_block."""
from freetoken.kernels._isa cimport ft_kernel, table


cdef extern from "tile_fp8_block.h":
    const ft_kernel ft_kernels_fp8_block[]


def kernels():
    """Every tile function of this format."""
    return table(ft_kernels_fp8_block, "fp8_block")
