/* What the formats with e2m1 codes share: the table of values, the decoding of one line, and the k-orders.
 *
 * A line is 8 weights of 16 rows: nibble i of a row's dword is weight i. Doubled, e2m1 values are integers; as
 * bytes they are kept unsigned (2 * value + 12) because VPDPBUSD and PMADDUBSW want one unsigned side, and the
 * activations' sum corrects for the 12.
 *
 * k-orders: shifting a dword by 4 i brings nibbles i and i + 4 into the low nibbles of its two halves, so bf16
 * pairs are (0,4) (1,5) (2,6) (3,7). Masking the low, then the high nibbles of its bytes gives bytes of weights
 * 0 2 4 6, then 1 3 5 7.
 */
#ifndef FREETOKEN_E2M1_H
#define FREETOKEN_E2M1_H
#include "isa.h"

static const float ft_e2m1[16] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
static const uint8_t ft_e2m1_doubled_plus12[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
static const uint16_t ft_e2m1_bf16[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                          0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
static const uint8_t ft_e2m1_order_bf16[8] = {0, 2, 4, 6, 1, 3, 5, 7}; /* weight k stands at order[k] */
static const uint8_t ft_e2m1_order_int8[8] = {0, 4, 1, 5, 2, 6, 3, 7};

/* The scalar definition of one line: 16 rows' sums of 8 products. */
static inline void ft_e2m1_line_fp32(const uint8_t *w, const float *x, float *sum) {
    for (int row = 0; row < 16; row++) {
        uint32_t lane = ft_load32(w + 4 * row);
        for (int k = 0; k < 8; k++) sum[row] += ft_e2m1[(lane >> (4 * k)) & 15] * x[k];
    }
}

/* Twice the integer sums of one line; x is in int8 order. */
static inline void ft_e2m1_line_int8(const uint8_t *w, const int8_t *x, int32_t *sum) {
    for (int row = 0; row < 16; row++) {
        uint32_t lane = ft_load32(w + 4 * row);
        for (int k = 0; k < 8; k++)
            sum[row] += ((int)ft_e2m1_doubled_plus12[(lane >> (4 * k)) & 15] - 12) * x[ft_e2m1_order_int8[k]];
    }
}

#ifdef FT_X86
/* 8 rows of one line against 8 fp32 activations, added to two chains. */
FT_TARGET_AVX2 static inline void ft_e2m1_half_avx2(const uint8_t *w, const float *x, __m256 *s0, __m256 *s1) {
    const __m256 magnitude = _mm256_loadu_ps(ft_e2m1); /* the low 3 bits of a lane choose */
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

/* 8 rows of one line against 8 int8 activations: pairs of products in 16 bits, at most 24 * 127 * 4 = 12,192. */
FT_TARGET_AVX2 static inline __m256i ft_e2m1_half_int8_avx2(const uint8_t *w, const int8_t *x) {
    const __m256i lut = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)ft_e2m1_doubled_plus12));
    const __m256i low = _mm256_set1_epi8(15);
    __m256i v = _mm256_loadu_si256((const void *)w);
    __m256i even = _mm256_shuffle_epi8(lut, _mm256_and_si256(v, low));
    __m256i odd = _mm256_shuffle_epi8(lut, _mm256_and_si256(_mm256_srli_epi16(v, 4), low));
    __m256i x0 = _mm256_set1_epi32((int)ft_load32((const uint8_t *)x));
    __m256i x1 = _mm256_set1_epi32((int)ft_load32((const uint8_t *)x + 4));
    return _mm256_add_epi16(_mm256_maddubs_epi16(even, x0), _mm256_maddubs_epi16(odd, x1));
}

FT_TARGET_AVX512 static inline void ft_e2m1_line_avx512(const uint8_t *w, const float *x, __m512 *s0, __m512 *s1) {
    const __m512 lut = _mm512_loadu_ps(ft_e2m1); /* the low 4 bits of a lane choose */
    __m512i v = _mm512_loadu_si512(w);
    for (int k = 0; k < 8; k += 2) {
        *s0 = _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(v, 4 * k), lut), _mm512_set1_ps(x[k]), *s0);
        *s1 = _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(v, 4 * k + 4), lut), _mm512_set1_ps(x[k + 1]),
                              *s1);
    }
}

FT_TARGET_VNNI static inline void ft_e2m1_line_vnni(const uint8_t *w, const int8_t *x, __m512i *s0, __m512i *s1) {
    const __m512i lut = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)ft_e2m1_doubled_plus12));
    const __m512i low = _mm512_set1_epi8(15);
    __m512i v = _mm512_loadu_si512(w);
    __m512i even = _mm512_shuffle_epi8(lut, _mm512_and_si512(v, low));
    __m512i odd = _mm512_shuffle_epi8(lut, _mm512_and_si512(_mm512_srli_epi16(v, 4), low));
    *s0 = _mm512_dpbusd_epi32(*s0, even, _mm512_set1_epi32((int)ft_load32((const uint8_t *)x)));
    *s1 = _mm512_dpbusd_epi32(*s1, odd, _mm512_set1_epi32((int)ft_load32((const uint8_t *)x + 4)));
}

/* 16-bit table look-up of the low nibble of each half lane gives bf16 pairs; no value is subnormal. */
FT_TARGET_BF16 static inline void ft_e2m1_line_bf16(const uint8_t *w, const uint8_t *x, __m512 *s0, __m512 *s1) {
    const __m512i half = _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)ft_e2m1_bf16));
    __m512i v = _mm512_loadu_si512(w);
#define FT_STEP(i, s)                                                                                                \
    *(s) = _mm512_dpbf16_ps(*(s), (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi32(v, 4 * (i)), half),           \
                            (__m512bh)_mm512_set1_epi32((int)ft_load32(x + 4 * (i))))
    FT_STEP(0, s0); FT_STEP(1, s1); FT_STEP(2, s0); FT_STEP(3, s1);
#undef FT_STEP
}
#endif
#endif
