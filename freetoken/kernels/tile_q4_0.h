/* q4_0 tiles: a block is 32 weights: 16 fp16 scales (32 bytes), 4 lines of 4-bit codes (288 bytes).
 *
 * A weight is code - 8. The codes are the unsigned bytes that int8 products want, and 8 times the activations' sum
 * comes off; with bit 3 flipped, a code is the weight as a signed nibble. The versions are those of tile_mxfp4.h.
 */
#ifndef FREETOKEN_TILE_Q4_0_H
#define FREETOKEN_TILE_Q4_0_H
#include "fp16.h"
#include "nibble.h"

enum { Q4_0_BLOCK = 32, Q4_0_BYTES = 288 };

static const ft_nibble q4_0_table = {
    {-8.f, -7.f, -6.f, -5.f, -4.f, -3.f, -2.f, -1.f, 0.f, 1.f, 2.f, 3.f, 4.f, 5.f, 6.f, 7.f},
    {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
     0x40c0, 0x40e0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    8,
    1,
};

static void tile_q4_0_fp32_scalar(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const float *x = xv;
    float sum[16] = {0};
    for (ptrdiff_t b = 0; b < k / Q4_0_BLOCK; b++, w += Q4_0_BYTES, x += Q4_0_BLOCK) {
        float part[16] = {0};
        for (int line = 0; line < 4; line++) ft_nibble_line_fp32(&q4_0_table, w + 32 + 64 * line, x + 8 * line, part);
        for (int row = 0; row < 16; row++) sum[row] += part[row] * ft_fp16(w + 2 * row);
    }
    memcpy(y, sum, sizeof sum);
}

static void tile_q4_0_int8_scalar(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const int8_t *x = xv;
    const float *scale = ft_int8_scales(xv, k);
    float sum[16] = {0};
    for (ptrdiff_t b = 0; b < k / Q4_0_BLOCK; b++, w += Q4_0_BYTES, x += Q4_0_BLOCK) {
        int32_t part[16] = {0};
        for (int line = 0; line < 4; line++) ft_nibble_line_int8(&q4_0_table, w + 32 + 64 * line, x + 8 * line, part);
        for (int row = 0; row < 16; row++) sum[row] += (float)part[row] * scale[b] * ft_fp16(w + 2 * row);
    }
    memcpy(y, sum, sizeof sum);
}

static void tile_q4_0_int15_scalar(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const int8_t *x = xv;
    const float *scale = ft_int8_scales(xv, 2 * k);
    float sum[16] = {0};
    for (ptrdiff_t b = 0; b < k / Q4_0_BLOCK; b++, w += Q4_0_BYTES, x += Q4_0_BLOCK) {
        int32_t part[16] = {0};
        for (int line = 0; line < 4; line++)
            ft_nibble_line_int15(&q4_0_table, w + 32 + 64 * line, x + 8 * line, x + k + 8 * line, part);
        for (int row = 0; row < 16; row++) sum[row] += (float)part[row] * scale[b] * ft_fp16(w + 2 * row);
    }
    memcpy(y, sum, sizeof sum);
}

#ifdef FT_X86
/* 8 rows of one line against 8 fp32 activations: signed nibbles are moved to the top and back down. */
FT_TARGET_AVX2 static inline void q4_0_half_avx2(const uint8_t *w, const float *x, __m256 *s0, __m256 *s1) {
    __m256i v = _mm256_xor_si256(_mm256_loadu_si256((const void *)w), _mm256_set1_epi8((char)0x88));
#define FT_STEP(k, s)                                                                                                \
    *(s) = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 28 - 4 * (k)), 28)),            \
                           _mm256_broadcast_ss(x + (k)), *(s))
    FT_STEP(0, s0); FT_STEP(1, s1); FT_STEP(2, s0); FT_STEP(3, s1);
    FT_STEP(4, s0); FT_STEP(5, s1); FT_STEP(6, s0); FT_STEP(7, s1);
#undef FT_STEP
}

FT_TARGET_AVX2 static void tile_q4_0_fp32_avx2(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const float *x = xv;
    __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (ptrdiff_t b = 0; b < k / Q4_0_BLOCK; b++, w += Q4_0_BYTES, x += Q4_0_BLOCK) {
        for (int p = 0; p < Q4_0_BYTES; p += 64) FT_PREFETCH(w + p);
        for (int h = 0; h < 2; h++) {
            __m256 s0 = _mm256_setzero_ps(), s1 = s0;
            for (int line = 0; line < 4; line++) q4_0_half_avx2(w + 32 + 64 * line + 32 * h, x + 8 * line, &s0, &s1);
            __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const void *)(w + 16 * h)));
            sum[h] = _mm256_fmadd_ps(_mm256_add_ps(s0, s1), scale, sum[h]);
        }
    }
    _mm256_storeu_ps(y, sum[0]);
    _mm256_storeu_ps(y + 8, sum[1]);
}

FT_TARGET_AVX2 static void tile_q4_0_int8_avx2(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const int8_t *x = xv;
    const float *xscale = ft_int8_scales(xv, k);
    const int32_t *correction = ft_int8_corrections(xv, k, k / Q4_0_BLOCK);
    __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (ptrdiff_t b = 0; b < k / Q4_0_BLOCK; b++, w += Q4_0_BYTES, x += Q4_0_BLOCK) {
        for (int p = 0; p < Q4_0_BYTES; p += 64) FT_PREFETCH(w + p);
        __m256i total[2] = {_mm256_set1_epi32(correction[b]), _mm256_set1_epi32(correction[b])};
        for (int line = 0; line < 4; line += 2)
            ft_nibble_two_int8_avx2(&q4_0_table, w + 32 + 64 * line, x + 8 * line, total);
        for (int h = 0; h < 2; h++) {
            __m256 part = _mm256_mul_ps(_mm256_cvtepi32_ps(total[h]), _mm256_set1_ps(xscale[b]));
            sum[h] = _mm256_fmadd_ps(part, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(w + 16 * h))), sum[h]);
        }
    }
    _mm256_storeu_ps(y, sum[0]);
    _mm256_storeu_ps(y + 8, sum[1]);
}

FT_TARGET_AVX512 static inline __m512 q4_0_scales_avx512(const uint8_t *w) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)w));
}

FT_TARGET_AVX2 FT_BODY tiles_q4_0_int15_avx2(const uint8_t *w, ptrdiff_t k, const void *const *x, float *y, int n) {
    const ptrdiff_t blocks = k / Q4_0_BLOCK;
    __m256 sum[FT_FEW][2];
    for (int t = 0; t < n; t++) sum[t][0] = sum[t][1] = _mm256_setzero_ps();
    for (ptrdiff_t b = 0; b < blocks; b++, w += Q4_0_BYTES) {
        for (int p = 0; p < Q4_0_BYTES; p += 64) FT_PREFETCH(w + p);
        __m256i total[FT_FEW][2];
        ft_begin_int15_avx2(x, k, blocks, b, n, total);
        for (int line = 0; line < 4; line += 2)
            ft_nibble_two_int15_avx2(&q4_0_table, w + 32 + 64 * line, x, k, b * Q4_0_BLOCK + 8 * line, n, total);
        for (int t = 0; t < n; t++)
            for (int h = 0; h < 2; h++) {
                const __m256 part = ft_end_int15_avx2(x[t], k, b, total[t][h]);
                sum[t][h] = _mm256_fmadd_ps(part, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(w + 16 * h))), sum[t][h]);
            }
    }
    for (int t = 0; t < n; t++)
        for (int h = 0; h < 2; h++) _mm256_storeu_ps(y + 16 * t + 8 * h, sum[t][h]);
}
FT_TILE_AND_FOUR(FT_TARGET_AVX2, q4_0_int15_avx2)

FT_TARGET_AVX512 static void tile_q4_0_fp32_avx512(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const float *x = xv;
    __m512 sum = _mm512_setzero_ps();
    for (ptrdiff_t b = 0; b < k / Q4_0_BLOCK; b++, w += Q4_0_BYTES, x += Q4_0_BLOCK) {
        for (int p = 0; p < Q4_0_BYTES; p += 64) FT_PREFETCH(w + p);
        __m512 s[4];
        for (int i = 0; i < 4; i++) s[i] = _mm512_setzero_ps();
        for (int line = 0; line < 4; line++)
            ft_nibble_line_avx512(&q4_0_table, w + 32 + 64 * line, x + 8 * line, s + 2 * (line & 1),
                                  s + 2 * (line & 1) + 1);
        __m512 part = _mm512_add_ps(_mm512_add_ps(s[0], s[1]), _mm512_add_ps(s[2], s[3]));
        sum = _mm512_fmadd_ps(part, q4_0_scales_avx512(w), sum);
    }
    _mm512_storeu_ps(y, sum);
}

FT_TARGET_VNNI static void tile_q4_0_int8_vnni(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const int8_t *x = xv;
    const float *xscale = ft_int8_scales(xv, k);
    const int32_t *correction = ft_int8_corrections(xv, k, k / Q4_0_BLOCK);
    __m512 sum = _mm512_setzero_ps();
    for (ptrdiff_t b = 0; b < k / Q4_0_BLOCK; b++, w += Q4_0_BYTES, x += Q4_0_BLOCK) {
        for (int p = 0; p < Q4_0_BYTES; p += 64) FT_PREFETCH(w + p);
        __m512i s0 = _mm512_set1_epi32(correction[b]), s1 = _mm512_setzero_si512();
        for (int line = 0; line < 4; line++)
            ft_nibble_line_vnni(&q4_0_table, w + 32 + 64 * line, x + 8 * line, &s0, &s1);
        __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(s0, s1)), _mm512_set1_ps(xscale[b]));
        sum = _mm512_fmadd_ps(part, q4_0_scales_avx512(w), sum);
    }
    _mm512_storeu_ps(y, sum);
}

FT_TARGET_VNNI FT_BODY tiles_q4_0_int15_vnni(const uint8_t *w, ptrdiff_t k, const void *const *x, float *y,
                                            int n) {
    const ptrdiff_t blocks = k / Q4_0_BLOCK;
    __m512 sum[FT_FEW];
    for (int t = 0; t < n; t++) sum[t] = _mm512_setzero_ps();
    for (ptrdiff_t b = 0; b < blocks; b++, w += Q4_0_BYTES) {
        for (int p = 0; p < 288; p += 64) FT_PREFETCH(w + p);
        __m512i high[FT_FEW], low[FT_FEW];
        ft_begin_int15(x, k, blocks, b, n, high, low);
        for (int line = 0; line < 4; line++)
            ft_nibble_line_vnni15(&q4_0_table, w + 32 + 64 * line, x, k, b * Q4_0_BLOCK + 8 * line, n, high, low);
        const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const void *)w));
        for (int t = 0; t < n; t++) {
            const __m512 part = ft_end_int15(x[t], k, b, high[t], low[t]);
            sum[t] = _mm512_fmadd_ps(part, scale, sum[t]);
        }
    }
    for (int t = 0; t < n; t++) _mm512_storeu_ps(y + 16 * t, sum[t]);
}
FT_TILE_AND_FEW(FT_TARGET_VNNI, q4_0_int15_vnni)

FT_TARGET_AMX static inline uint16_t q4_0_lines_amx(const uint8_t *w, uint8_t *lines, float *scales) {
    for (int p = 0; p < 288; p += 64) FT_PREFETCH(w + p);
    for (int line = 0; line < 4; line++)
        ft_nibble_pairs_avx512(&q4_0_table, w + 32 + 64 * line, lines + 256 * line);
    _mm512_store_ps(scales, _mm512_cvtph_ps(_mm256_loadu_si256((const void *)w)));
    return 0;
}

FT_TARGET_AMX static void many_q4_0_int15_amx(const uint8_t *w, ptrdiff_t k, const void *x, ptrdiff_t stride, int n,
                                              float *y) {
    ft_amx_int15(w, k, Q4_0_BLOCK, Q4_0_BYTES, q4_0_lines_amx, 1.f, x, stride, n, y);
}

FT_TARGET_BF16 static void tile_q4_0_bf16_avx512bf16(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const uint8_t *x = xv;
    __m512 sum = _mm512_setzero_ps();
    for (ptrdiff_t b = 0; b < k / Q4_0_BLOCK; b++, w += Q4_0_BYTES, x += 2 * Q4_0_BLOCK) {
        for (int p = 0; p < Q4_0_BYTES; p += 64) FT_PREFETCH(w + p);
        __m512 s0 = _mm512_setzero_ps(), s1 = s0;
        for (int line = 0; line < 4; line++)
            ft_nibble_line_bf16(&q4_0_table, w + 32 + 64 * line, x + 16 * line, &s0, &s1);
        sum = _mm512_fmadd_ps(_mm512_add_ps(s0, s1), q4_0_scales_avx512(w), sum);
    }
    _mm512_storeu_ps(y, sum);
}
#endif

static const ft_kernel ft_kernels_q4_0[] = {
    {FT_SCALAR, FT_FP32, tile_q4_0_fp32_scalar, NULL, 0, 0, NULL, NULL, NULL, 0},
    {FT_SCALAR, FT_INT8, tile_q4_0_int8_scalar, ft_nibble_order_int8, 8, 1.f, NULL, NULL, NULL, 0},
    {FT_SCALAR, FT_INT15, tile_q4_0_int15_scalar, ft_nibble_order_int8, 8, 1.f, NULL, NULL, NULL, 0},
#ifdef FT_X86
    {FT_AVX2, FT_FP32, tile_q4_0_fp32_avx2, NULL, 0, 0, NULL, NULL, NULL, 0},
    {FT_AVX2, FT_INT8, tile_q4_0_int8_avx2, ft_nibble_order_int8, 8, 1.f, NULL, NULL, NULL, 0},
    {FT_AVX2, FT_INT15, tile_q4_0_int15_avx2, ft_nibble_order_int8, 8, 1.f, few_q4_0_int15_avx2, NULL, NULL, 0},
    {FT_AVX512, FT_FP32, tile_q4_0_fp32_avx512, NULL, 0, 0, NULL, NULL, NULL, 0},
    {FT_AVX512VNNI, FT_INT8, tile_q4_0_int8_vnni, ft_nibble_order_int8, 8, 1.f, NULL, NULL, NULL, 0},
    {FT_AVX512VNNI, FT_INT15, tile_q4_0_int15_vnni, ft_nibble_order_int8, 8, 1.f, few_q4_0_int15_vnni, NULL, NULL, 0},
    {FT_AVX512BF16, FT_BF16, tile_q4_0_bf16_avx512bf16, ft_nibble_order_bf16, 0, 0, NULL, NULL, NULL, 0},
    {FT_AMX, FT_INT15, tile_q4_0_int15_vnni, ft_nibble_order_int8, 8, 1.f, few_q4_0_int15_vnni,
     many_q4_0_int15_amx, ft_nibble_order_bf16, FT_INT15_MANY_FROM},
#endif
    {FT_LEVELS, 0, NULL, NULL, 0, 0, NULL, NULL, NULL, 0},
};
#endif
