/* How a block of n INT15 vectors begins and ends in tiles: in VNNI ones with sums of high digits and of low ones, 16 rows
 * each, in AVX2 ones with sums of both, two times 8 rows. */
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

FT_TARGET_AVX2 FT_BODY ft_begin_int15_avx2(const void *const *x, ptrdiff_t k, ptrdiff_t blocks, ptrdiff_t b, int n,
                                           __m256i sum[][2]) {
    for (int t = 0; t < n; t++) sum[t][0] = sum[t][1] = _mm256_set1_epi32(ft_int8_corrections(x[t], 2 * k, blocks)[b]);
}

FT_TARGET_AVX2 static inline __m256 ft_end_int15_avx2(const void *x, ptrdiff_t k, ptrdiff_t b, __m256i sum) {
    return _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(ft_int8_scales(x, 2 * k)[b]));
}
#endif
#endif
