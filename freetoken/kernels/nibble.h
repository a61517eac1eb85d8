/* What the formats with 4-bit codes share: the decoding of one line through a table of 16 values, and the k-orders.
 *
 * A line is 8 weights of 16 rows: nibble i of a row's dword is weight i. For int8 activations values are unsigned
 * bytes (a multiple of the value plus an offset), because VPDPBUSD and PMADDUBSW want one unsigned side; the
 * activations' sum corrects for the offset. The table is a constant at every call, so that its choices are made by
 * the compiler.
 *
 * k-orders: shifting a dword by 4 i brings nibbles i and i + 4 into the low nibbles of its two halves, so bf16
 * pairs are (0,4) (1,5) (2,6) (3,7). Masking the low, then the high nibbles of its bytes gives bytes of weights
 * 0 2 4 6, then 1 3 5 7.
 */
#ifndef FREETOKEN_NIBBLE_H
#define FREETOKEN_NIBBLE_H
#include "amx.h"

typedef struct {
    float fp32[16];     /* value of each code */
    uint16_t bf16[16];  /* the same, exactly; none is subnormal */
    uint8_t bytes[16];  /* multiple * value + offset, at most 24 */
    int offset;
    int bytes_are_codes; /* bytes[i] is i: nothing to look up */
} ft_nibble;

static const uint8_t ft_nibble_order_bf16[8] = {0, 2, 4, 6, 1, 3, 5, 7}; /* weight k stands at order[k] */
static const uint8_t ft_nibble_order_int8[8] = {0, 4, 1, 5, 2, 6, 3, 7};

/* The scalar definition of one line: 16 rows' sums of 8 products. */
static inline void ft_nibble_line_fp32(const ft_nibble *t, const uint8_t *w, const float *x, float *sum) {
    for (int row = 0; row < 16; row++) {
        uint32_t lane = ft_load32(w + 4 * row);
        for (int k = 0; k < 8; k++) sum[row] += t->fp32[(lane >> (4 * k)) & 15] * x[k];
    }
}

/* The integer sums of one line, times the table's multiple; x is in int8 order. */
static inline void ft_nibble_line_int8(const ft_nibble *t, const uint8_t *w, const int8_t *x, int32_t *sum) {
    for (int row = 0; row < 16; row++) {
        uint32_t lane = ft_load32(w + 4 * row);
        for (int k = 0; k < 8; k++)
            sum[row] += ((int)t->bytes[(lane >> (4 * k)) & 15] - t->offset) * x[ft_nibble_order_int8[k]];
    }
}

/* The same with activations of two digits, `low` k bytes behind `x`. */
static inline void ft_nibble_line_int15(const ft_nibble *t, const uint8_t *w, const int8_t *x, const int8_t *low,
                                        int32_t *sum) {
    for (int row = 0; row < 16; row++) {
        uint32_t lane = ft_load32(w + 4 * row);
        for (int k = 0; k < 8; k++) {
            int at = ft_nibble_order_int8[k];
            sum[row] += ((int)t->bytes[(lane >> (4 * k)) & 15] - t->offset) * (128 * x[at] + low[at]);
        }
    }
}

#ifdef FT_X86
/* 8 rows' unsigned bytes of one line: of the even weights, then of the odd ones. */
FT_TARGET_AVX2 static inline void ft_nibble_bytes_avx2(const ft_nibble *t, const uint8_t *w, __m256i *even, __m256i *odd) {
    const __m256i lut = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)t->bytes));
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i v = _mm256_loadu_si256((const void *)w);
    *even = _mm256_and_si256(v, mask);
    *odd = _mm256_and_si256(_mm256_srli_epi16(v, 4), mask);
    if (!t->bytes_are_codes) {
        *even = _mm256_shuffle_epi8(lut, *even);
        *odd = _mm256_shuffle_epi8(lut, *odd);
    }
}

/* Two lines' unsigned bytes of rows 0-7, then of rows 8-15. */
FT_TARGET_AVX2 static inline void ft_nibble_two_avx2(const ft_nibble *t, const uint8_t *w, __m256i bytes[2][4]) {
    for (int h = 0; h < 2; h++)
        for (int line = 0; line < 2; line++)
            ft_nibble_bytes_avx2(t, w + 64 * line + 32 * h, &bytes[h][2 * line], &bytes[h][2 * line + 1]);
}

/* Their products with 16 int8 activations, each read once for all rows: sums of eight in 16 bits, at most 24 * 127 * 8,
 * are multiplied by `factor` and added to 32 bits. */
FT_TARGET_AVX2 static inline void ft_nibble_add_avx2(const __m256i bytes[2][4], const uint8_t *x, int factor, __m256i *sum) {
    __m256i part[2];
    for (int i = 0; i < 4; i++) {
        const __m256i four = _mm256_set1_epi32((int)ft_load32(x + 4 * i));
        for (int h = 0; h < 2; h++) {
            const __m256i products = _mm256_maddubs_epi16(bytes[h][i], four);
            part[h] = i ? _mm256_add_epi16(part[h], products) : products;
        }
    }
    for (int h = 0; h < 2; h++)
        sum[h] = _mm256_add_epi32(sum[h], _mm256_madd_epi16(part[h], _mm256_set1_epi16((short)factor)));
}

/* Two lines against 16 int8 activations, without the offset taken off, added to the sums of both halves of the rows. */
FT_TARGET_AVX2 static inline void ft_nibble_two_int8_avx2(const ft_nibble *t, const uint8_t *w, const int8_t *x,
                                                          __m256i *sum) {
    __m256i bytes[2][4];
    ft_nibble_two_avx2(t, w, bytes);
    ft_nibble_add_avx2(bytes, (const uint8_t *)x, 1, sum);
}

/* The same with n vectors of activations of two digits, those of the lines `at` bytes behind their start and the low ones
 * k bytes behind the high. */
FT_TARGET_AVX2 FT_BODY ft_nibble_two_int15_avx2(const ft_nibble *table, const uint8_t *w, const void *const *x,
                                                ptrdiff_t k, ptrdiff_t at, int n, __m256i sum[][2]) {
    __m256i bytes[2][4];
    ft_nibble_two_avx2(table, w, bytes);
    for (int t = 0; t < n; t++) {
        ft_nibble_add_avx2(bytes, (const uint8_t *)x[t] + at, 128, sum[t]);
        ft_nibble_add_avx2(bytes, (const uint8_t *)x[t] + at + k, 1, sum[t]);
    }
}

FT_TARGET_AVX512 static inline void ft_nibble_line_avx512(const ft_nibble *t, const uint8_t *w, const float *x,
                                                          __m512 *s0, __m512 *s1) {
    const __m512 lut = _mm512_loadu_ps(t->fp32); /* the low 4 bits of a lane choose */
    __m512i v = _mm512_loadu_si512(w);
    for (int k = 0; k < 8; k += 2) {
        *s0 = _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(v, 4 * k), lut), _mm512_set1_ps(x[k]), *s0);
        *s1 = _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(v, 4 * k + 4), lut), _mm512_set1_ps(x[k + 1]),
                              *s1);
    }
}

/* A line's unsigned bytes: of the even weights, then of the odd ones. */
FT_TARGET_AVX512 static inline void ft_nibble_bytes_avx512(const ft_nibble *t, const uint8_t *w, __m512i *even,
                                                           __m512i *odd) {
    const __m512i lut = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)t->bytes));
    const __m512i mask = _mm512_set1_epi8(15);
    __m512i v = _mm512_loadu_si512(w);
    *even = _mm512_and_si512(v, mask);
    *odd = _mm512_and_si512(_mm512_srli_epi16(v, 4), mask);
    if (!t->bytes_are_codes) {
        *even = _mm512_shuffle_epi8(lut, *even);
        *odd = _mm512_shuffle_epi8(lut, *odd);
    }
}

FT_TARGET_VNNI static inline void ft_nibble_line_vnni(const ft_nibble *t, const uint8_t *w, const int8_t *x,
                                                      __m512i *s0, __m512i *s1) {
    __m512i even, odd;
    ft_nibble_bytes_avx512(t, w, &even, &odd);
    *s0 = _mm512_dpbusd_epi32(*s0, even, _mm512_set1_epi32((int)ft_load32((const uint8_t *)x)));
    *s1 = _mm512_dpbusd_epi32(*s1, odd, _mm512_set1_epi32((int)ft_load32((const uint8_t *)x + 4)));
}

/* The same with n vectors of activations of two digits, those of the line `at` bytes behind their start and the low ones
 * k bytes behind the high: sums of either. */
FT_TARGET_VNNI FT_BODY ft_nibble_line_vnni15(const ft_nibble *table, const uint8_t *w, const void *const *x, ptrdiff_t k,
                                             ptrdiff_t at, int n, __m512i *high_sum, __m512i *low_sum) {
    __m512i even, odd;
    ft_nibble_bytes_avx512(table, w, &even, &odd);
    for (int t = 0; t < n; t++) {
        const uint8_t *high = (const uint8_t *)x[t] + at, *low = high + k;
        high_sum[t] = _mm512_dpbusd_epi32(high_sum[t], even, _mm512_set1_epi32((int)ft_load32(high)));
        low_sum[t] = _mm512_dpbusd_epi32(low_sum[t], even, _mm512_set1_epi32((int)ft_load32(low)));
        high_sum[t] = _mm512_dpbusd_epi32(high_sum[t], odd, _mm512_set1_epi32((int)ft_load32(high + 4)));
        low_sum[t] = _mm512_dpbusd_epi32(low_sum[t], odd, _mm512_set1_epi32((int)ft_load32(low + 4)));
    }
}

/* A line as four of pairs of bf16, for the matrix unit. */
FT_TARGET_AVX512 static inline void ft_nibble_pairs_avx512(const ft_nibble *t, const uint8_t *w, uint8_t *lines) {
    const __m512i lut = _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)t->bf16)), v = _mm512_loadu_si512(w);
    for (int i = 0; i < 4; i++)
        _mm512_store_si512(lines + 64 * i, _mm512_permutexvar_epi16(_mm512_srli_epi32(v, 4 * i), lut));
}

/* 16-bit table look-up of the low nibble of each half lane gives bf16 pairs. */
FT_TARGET_BF16 static inline void ft_nibble_line_bf16(const ft_nibble *t, const uint8_t *w, const uint8_t *x,
                                                      __m512 *s0, __m512 *s1) {
    const __m512i half = _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)t->bf16));
    __m512i v = _mm512_loadu_si512(w);
#define FT_STEP(i, s)                                                                                                \
    *(s) = _mm512_dpbf16_ps(*(s), (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi32(v, 4 * (i)), half),           \
                            (__m512bh)_mm512_set1_epi32((int)ft_load32(x + 4 * (i))))
    FT_STEP(0, s0); FT_STEP(1, s1); FT_STEP(2, s0); FT_STEP(3, s1);
#undef FT_STEP
}
#endif
#endif
