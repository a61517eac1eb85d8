"""The CPU tiles of nvfp4."""
from freetoken.kernels._isa cimport ft_kernel, table


cdef extern from "tile_nvfp4.h":
    const ft_kernel ft_kernels_nvfp4[]


def kernels():
    """Every tile function of this format."""
    return table(ft_kernels_nvfp4, "nvfp4")
