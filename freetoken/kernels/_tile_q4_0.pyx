"""The CPU tiles of q4_0."""
from freetoken.kernels._isa cimport ft_kernel, table


cdef extern from "tile_q4_0.h":
    const ft_kernel ft_kernels_q4_0[]


def kernels():
    """Every tile function of this format."""
    return table(ft_kernels_q4_0, "q4_0")
