/* How a block of n INT15 vectors begins and ends in VNNI tiles: sums of high digits and of low ones, 16 rows each. */
#ifndef FREETOKEN_INT15_H
#define FREETOKEN_INT15_H
#include "isa.h"

#ifdef FT_X86
FT_TARGET_VNNI FT_BODY ft_begin_int15(const void *const *x, ptrdiff_t k, ptrdiff_t blocks, ptrdiff_t b, int n,
                                      __m512i *high, __m512i *low) {
    for (int t = 0; t < n; t++) {
        high[t] = _mm512_setzero_si512();
        low[t] = _mm512_set1_epi32(ft_int8_corrections(x[t], 2 * k, blocks)[b]);
    }
}

/* 128 high + low, times the activations' scale: all but the weights' scales. */
FT_TARGET_VNNI static inline __m512 ft_end_int15(const void *x, ptrdiff_t k, ptrdiff_t b, __m512i high, __m512i low) {
    const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 7), low);
    return _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(ft_int8_scales(x, 2 * k)[b]));
}
#endif
#endif
