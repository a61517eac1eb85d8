"""The CPU tiles of bf16."""
from freetoken.kernels._isa cimport ft_kernel, table


cdef extern from "tile_bf16.h":
    const ft_kernel ft_kernels_bf16[]


def kernels():
    """Every tile function of this format."""
    return table(ft_kernels_bf16, "bf16")
