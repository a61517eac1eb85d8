"""The CPU tiles of q8_0."""
from freetoken.kernels._isa cimport ft_kernel, table


cdef extern from "tile_q8_0.h":
    const ft_kernel ft_kernels_q8_0[]


def kernels():
    """Every tile function of this format."""
    return table(ft_kernels_q8_0, "q8_0")
