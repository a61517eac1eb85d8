"""The CPU tiles of mxfp4."""
from freetoken.kernels._isa cimport ft_kernel, table


cdef extern from "tile_mxfp4.h":
    const ft_kernel ft_kernels_mxfp4[]


def kernels():
    """Every tile function of this format."""
    return table(ft_kernels_mxfp4, "mxfp4")
