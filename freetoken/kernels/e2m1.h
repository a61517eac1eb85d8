/* e2m1: the table of its values and, for AVX2, a look-up that takes the sign apart (VPERMPS there has 8 entries). */
#ifndef FREETOKEN_E2M1_H
#define FREETOKEN_E2M1_H
#include "nibble.h"

/* Doubled, e2m1 values are integers from -12 to 12. */
static const ft_nibble ft_e2m1 = {
    {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f},
    {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040,
     0xc080, 0xc0c0},
    {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0},
    12,
    0,
};

#ifdef FT_X86
/* 8 rows of one line against 8 fp32 activations, added to two chains. */
FT_TARGET_AVX2 static inline void ft_e2m1_half_avx2(const uint8_t *w, const float *x, __m256 *s0, __m256 *s1) {
    const __m256 magnitude = _mm256_loadu_ps(ft_e2m1.fp32); /* the low 3 bits of a lane choose */
    const __m256i sign = _mm256_set1_epi32((int)0x80000000u);
    __m256i v = _mm256_loadu_si256((const void *)w);
#define FT_STEP(k, s)                                                                                                \
    do {                                                                                                             \
        __m256 m = _mm256_permutevar8x32_ps(magnitude, _mm256_srli_epi32(v, 4 * (k)));                               \
        __m256i minus = _mm256_and_si256(_mm256_slli_epi32(v, 28 - 4 * (k)), sign);                                  \
        m = _mm256_xor_ps(m, _mm256_castsi256_ps(minus));                                                            \
        *(s) = _mm256_fmadd_ps(m, _mm256_broadcast_ss(x + (k)), *(s));                                               \
    } while (0)
    FT_STEP(0, s0); FT_STEP(1, s1); FT_STEP(2, s0); FT_STEP(3, s1);
    FT_STEP(4, s0); FT_STEP(5, s1); FT_STEP(6, s0); FT_STEP(7, s1);
#undef FT_STEP
}
#endif
#endif
