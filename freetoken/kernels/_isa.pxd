"""Types of isa.h and the handle of one tile function."""
from libc.stddef cimport ptrdiff_t
from libc.stdint cimport int32_t, uint8_t


cdef extern from "isa.h" nogil:
    enum:
        FT_SCALAR
        FT_AVX2
        FT_AVX512
        FT_AVX512VNNI
        FT_AVX512BF16
        FT_AMX
        FT_LEVELS
        FT_FP32
        FT_BF16
        FT_INT8
        FT_INT15
    ctypedef void (*ft_tile)(const uint8_t *w, ptrdiff_t k, const void *x, float *y) noexcept
    ctypedef void (*ft_tile_few)(const uint8_t *w, ptrdiff_t k, const void *const *x, float *y) noexcept
    enum:
        FT_FEW
    ctypedef void (*ft_tile_many)(
        const uint8_t *w, ptrdiff_t k, const void *x, ptrdiff_t stride, int n, float *y
    ) noexcept
    enum:
        FT_MANY
    ctypedef struct ft_kernel:
        int level
        int act
        ft_tile tile
        const uint8_t *order
        int offset
        float unit
        ft_tile_few few
        ft_tile_many many
        const uint8_t *many_order
        int many_from
    int ft_best_level()


cdef class TileKernel:
    cdef ft_kernel entry
    cdef readonly str format
    cdef readonly str level
    cdef readonly str act
    cdef readonly bint few
    cdef readonly bint many


cdef list table(const ft_kernel *entries, str format)
