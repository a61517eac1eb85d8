/* mxfp4 tiles: a block is 32 weights: 16 e8m0 scales, 4 lines of e2m1 codes (272 bytes).
 *
 * Scale byte b is 2^(b-127): its fp32 bits are b << 23, but for b = 0, which is a subnormal. A subnormal operand costs
 * an Intel CPU an assist of hundreds of cycles (one block in 8 with code 0 made a loop 1.9 times slower there), so code
 * 0 is taken as half of code 1, the half applied to the block's sum. Sums meet the scale last, so that only a result
 * that is itself tiny is ever subnormal.
 *
 * scalar   the definition, fp32 and int8 activations
 * avx2     8 rows at a time: VPERMPS as table look-up (fp32), PSHUFB and PMADDUBSW (int8)
 * avx512   16 rows, VPERMPS look-up of all 16 values
 * vnni     PSHUFB look-up of unsigned doubled values, VPDPBUSD, one correction per block
 * bf16     VPERMW look-up of bf16 pairs, VDPBF16PS; weights exact
 */
#ifndef FREETOKEN_TILE_MXFP4_H
#define FREETOKEN_TILE_MXFP4_H
#include "e2m1.h"

enum { MXFP4_BLOCK = 32, MXFP4_BYTES = 272 };

static inline float ft_e8m0(uint8_t b) { return ft_bits_to_float(b ? (uint32_t)b << 23 : 0x00400000u); }

static void tile_mxfp4_fp32_scalar(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const float *x = xv;
    float sum[16] = {0};
    for (ptrdiff_t b = 0; b < k / MXFP4_BLOCK; b++, w += MXFP4_BYTES, x += MXFP4_BLOCK) {
        float part[16] = {0};
        for (int line = 0; line < 4; line++) ft_nibble_line_fp32(&ft_e2m1, w + 16 + 64 * line, x + 8 * line, part);
        for (int row = 0; row < 16; row++) sum[row] += part[row] * ft_e8m0(w[row]);
    }
    memcpy(y, sum, sizeof sum);
}

static void tile_mxfp4_int8_scalar(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const int8_t *x = xv;
    const float *scale = ft_int8_scales(xv, k);
    float sum[16] = {0};
    for (ptrdiff_t b = 0; b < k / MXFP4_BLOCK; b++, w += MXFP4_BYTES, x += MXFP4_BLOCK) {
        int32_t part[16] = {0};
        for (int line = 0; line < 4; line++) ft_nibble_line_int8(&ft_e2m1, w + 16 + 64 * line, x + 8 * line, part);
        for (int row = 0; row < 16; row++) sum[row] += (float)part[row] * scale[b] * ft_e8m0(w[row]);
    }
    memcpy(y, sum, sizeof sum);
}

static void tile_mxfp4_int15_scalar(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const int8_t *x = xv;
    const float *scale = ft_int8_scales(xv, 2 * k);
    float sum[16] = {0};
    for (ptrdiff_t b = 0; b < k / MXFP4_BLOCK; b++, w += MXFP4_BYTES, x += MXFP4_BLOCK) {
        int32_t part[16] = {0};
        for (int line = 0; line < 4; line++)
            ft_nibble_line_int15(&ft_e2m1, w + 16 + 64 * line, x + 8 * line, x + k + 8 * line, part);
        for (int row = 0; row < 16; row++) sum[row] += (float)part[row] * scale[b] * ft_e8m0(w[row]);
    }
    memcpy(y, sum, sizeof sum);
}

#ifdef FT_X86
/* sum + part * scale, the scales of 8 or 16 rows read at p. */
FT_TARGET_AVX2 static inline __m256 ft_e8m0_fmadd_avx2(__m256 part, const uint8_t *p, __m256 sum) {
    __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p));
    __m256 zero = _mm256_castsi256_ps(_mm256_cmpeq_epi32(code, _mm256_setzero_si256()));
    part = _mm256_blendv_ps(part, _mm256_mul_ps(part, _mm256_set1_ps(.5f)), zero);
    __m256i bits = _mm256_slli_epi32(_mm256_max_epu32(code, _mm256_set1_epi32(1)), 23);
    return _mm256_fmadd_ps(part, _mm256_castsi256_ps(bits), sum);
}

/* 16 scales, code 0 as code 1; the rows whose code is 0. */
FT_TARGET_AVX512 static inline __mmask16 ft_e8m0_avx512(const uint8_t *p, __m512 *scales) {
    __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p));
    *scales = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_max_epu32(code, _mm512_set1_epi32(1)), 23));
    return _mm512_testn_epi32_mask(code, code);
}

FT_TARGET_AVX512 static inline __m512 ft_e8m0_fmadd_avx512(__m512 part, const uint8_t *p, __m512 sum) {
    __m512 scales;
    const __mmask16 zero = ft_e8m0_avx512(p, &scales);
    return _mm512_fmadd_ps(_mm512_mask_mul_ps(part, zero, part, _mm512_set1_ps(.5f)), scales, sum);
}

FT_TARGET_AVX2 static void tile_mxfp4_fp32_avx2(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const float *x = xv;
    __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (ptrdiff_t b = 0; b < k / MXFP4_BLOCK; b++, w += MXFP4_BYTES, x += MXFP4_BLOCK) {
        for (int p = 0; p < 256; p += 64) FT_PREFETCH(w + p);
        for (int h = 0; h < 2; h++) {
            __m256 s0 = _mm256_setzero_ps(), s1 = s0;
            for (int line = 0; line < 4; line++) ft_e2m1_half_avx2(w + 16 + 64 * line + 32 * h, x + 8 * line, &s0, &s1);
            sum[h] = ft_e8m0_fmadd_avx2(_mm256_add_ps(s0, s1), w + 8 * h, sum[h]);
        }
    }
    _mm256_storeu_ps(y, sum[0]);
    _mm256_storeu_ps(y + 8, sum[1]);
}

FT_TARGET_AVX2 static void tile_mxfp4_int8_avx2(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const int8_t *x = xv;
    const float *scale = ft_int8_scales(xv, k);
    const int32_t *correction = ft_int8_corrections(xv, k, k / MXFP4_BLOCK);
    __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (ptrdiff_t b = 0; b < k / MXFP4_BLOCK; b++, w += MXFP4_BYTES, x += MXFP4_BLOCK) {
        for (int p = 0; p < 256; p += 64) FT_PREFETCH(w + p);
        __m256i total[2] = {_mm256_set1_epi32(correction[b]), _mm256_set1_epi32(correction[b])};
        for (int line = 0; line < 4; line += 2)
            ft_nibble_two_int8_avx2(&ft_e2m1, w + 16 + 64 * line, x + 8 * line, total);
        for (int h = 0; h < 2; h++) {
            __m256 part = _mm256_mul_ps(_mm256_cvtepi32_ps(total[h]), _mm256_set1_ps(scale[b]));
            sum[h] = ft_e8m0_fmadd_avx2(part, w + 8 * h, sum[h]);
        }
    }
    _mm256_storeu_ps(y, sum[0]);
    _mm256_storeu_ps(y + 8, sum[1]);
}

FT_TARGET_AVX2 FT_BODY tiles_mxfp4_int15_avx2(const uint8_t *w, ptrdiff_t k, const void *const *x, float *y, int n) {
    const ptrdiff_t blocks = k / MXFP4_BLOCK;
    __m256 sum[FT_FEW][2];
    for (int t = 0; t < n; t++) sum[t][0] = sum[t][1] = _mm256_setzero_ps();
    for (ptrdiff_t b = 0; b < blocks; b++, w += MXFP4_BYTES) {
        for (int p = 0; p < 256; p += 64) FT_PREFETCH(w + p);
        __m256i total[FT_FEW][2];
        ft_begin_int15_avx2(x, k, blocks, b, n, total);
        for (int line = 0; line < 4; line += 2)
            ft_nibble_two_int15_avx2(&ft_e2m1, w + 16 + 64 * line, x, k, b * MXFP4_BLOCK + 8 * line, n, total);
        for (int t = 0; t < n; t++)
            for (int h = 0; h < 2; h++) {
                const __m256 part = ft_end_int15_avx2(x[t], k, b, total[t][h]);
                sum[t][h] = ft_e8m0_fmadd_avx2(part, w + 8 * h, sum[t][h]);
            }
    }
    for (int t = 0; t < n; t++)
        for (int h = 0; h < 2; h++) _mm256_storeu_ps(y + 16 * t + 8 * h, sum[t][h]);
}
FT_TILE_AND_FOUR(FT_TARGET_AVX2, mxfp4_int15_avx2)

FT_TARGET_AVX512 static void tile_mxfp4_fp32_avx512(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const float *x = xv;
    __m512 sum = _mm512_setzero_ps();
    for (ptrdiff_t b = 0; b < k / MXFP4_BLOCK; b++, w += MXFP4_BYTES, x += MXFP4_BLOCK) {
        for (int p = 0; p < 256; p += 64) FT_PREFETCH(w + p);
        __m512 s[4];
        for (int i = 0; i < 4; i++) s[i] = _mm512_setzero_ps();
        for (int line = 0; line < 4; line++)
            ft_nibble_line_avx512(&ft_e2m1, w + 16 + 64 * line, x + 8 * line, s + 2 * (line & 1),
                                  s + 2 * (line & 1) + 1);
        __m512 part = _mm512_add_ps(_mm512_add_ps(s[0], s[1]), _mm512_add_ps(s[2], s[3]));
        sum = ft_e8m0_fmadd_avx512(part, w, sum);
    }
    _mm512_storeu_ps(y, sum);
}

FT_TARGET_VNNI static void tile_mxfp4_int8_vnni(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const int8_t *x = xv;
    const float *scale = ft_int8_scales(xv, k);
    const int32_t *correction = ft_int8_corrections(xv, k, k / MXFP4_BLOCK);
    __m512 sum = _mm512_setzero_ps();
    for (ptrdiff_t b = 0; b < k / MXFP4_BLOCK; b++, w += MXFP4_BYTES, x += MXFP4_BLOCK) {
        for (int p = 0; p < 256; p += 64) FT_PREFETCH(w + p);
        __m512i s0 = _mm512_set1_epi32(correction[b]), s1 = _mm512_setzero_si512();
        for (int line = 0; line < 4; line++) ft_nibble_line_vnni(&ft_e2m1, w + 16 + 64 * line, x + 8 * line, &s0, &s1);
        __m512 part = _mm512_cvtepi32_ps(_mm512_add_epi32(s0, s1));
        sum = ft_e8m0_fmadd_avx512(_mm512_mul_ps(part, _mm512_set1_ps(scale[b])), w, sum);
    }
    _mm512_storeu_ps(y, sum);
}

FT_TARGET_VNNI FT_BODY tiles_mxfp4_int15_vnni(const uint8_t *w, ptrdiff_t k, const void *const *x, float *y,
                                            int n) {
    const ptrdiff_t blocks = k / MXFP4_BLOCK;
    __m512 sum[FT_FEW];
    for (int t = 0; t < n; t++) sum[t] = _mm512_setzero_ps();
    for (ptrdiff_t b = 0; b < blocks; b++, w += MXFP4_BYTES) {
        for (int p = 0; p < 256; p += 64) FT_PREFETCH(w + p);
        __m512i high[FT_FEW], low[FT_FEW];
        ft_begin_int15(x, k, blocks, b, n, high, low);
        for (int line = 0; line < 4; line++)
            ft_nibble_line_vnni15(&ft_e2m1, w + 16 + 64 * line, x, k, b * MXFP4_BLOCK + 8 * line, n, high, low);
        for (int t = 0; t < n; t++) {
            const __m512 part = ft_end_int15(x[t], k, b, high[t], low[t]);
            sum[t] = ft_e8m0_fmadd_avx512(part, w, sum[t]);
        }
    }
    for (int t = 0; t < n; t++) _mm512_storeu_ps(y + 16 * t, sum[t]);
}
FT_TILE_AND_FEW(FT_TARGET_VNNI, mxfp4_int15_vnni)

FT_TARGET_AMX static inline uint16_t mxfp4_lines_amx(const uint8_t *w, uint8_t *lines, float *scales) {
    for (int p = 0; p < 256; p += 64) FT_PREFETCH(w + p);
    for (int line = 0; line < 4; line++)
        ft_nibble_pairs_avx512(&ft_e2m1, w + 16 + 64 * line, lines + 256 * line);
    return ft_e8m0_avx512(w, (__m512 *)scales);
}

FT_TARGET_AMX static void many_mxfp4_int15_amx(const uint8_t *w, ptrdiff_t k, const void *x, ptrdiff_t stride, int n,
                                               float *y) {
    ft_amx_int15(w, k, MXFP4_BLOCK, MXFP4_BYTES, mxfp4_lines_amx, 1.f, x, stride, n, y);
}

FT_TARGET_BF16 static void tile_mxfp4_bf16_avx512bf16(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const uint8_t *x = xv;
    __m512 sum = _mm512_setzero_ps();
    for (ptrdiff_t b = 0; b < k / MXFP4_BLOCK; b++, w += MXFP4_BYTES, x += 2 * MXFP4_BLOCK) {
        for (int p = 0; p < 256; p += 64) FT_PREFETCH(w + p);
        __m512 s0 = _mm512_setzero_ps(), s1 = s0;
        for (int line = 0; line < 4; line++) ft_nibble_line_bf16(&ft_e2m1, w + 16 + 64 * line, x + 16 * line, &s0, &s1);
        sum = ft_e8m0_fmadd_avx512(_mm512_add_ps(s0, s1), w, sum);
    }
    _mm512_storeu_ps(y, sum);
}
#endif

static const ft_kernel ft_kernels_mxfp4[] = {
    {FT_SCALAR, FT_FP32, tile_mxfp4_fp32_scalar, NULL, 0, 0, NULL, NULL, NULL, 0},
    {FT_SCALAR, FT_INT8, tile_mxfp4_int8_scalar, ft_nibble_order_int8, 12, .5f, NULL, NULL, NULL, 0},
    {FT_SCALAR, FT_INT15, tile_mxfp4_int15_scalar, ft_nibble_order_int8, 12, .5f, NULL, NULL, NULL, 0},
#ifdef FT_X86
    {FT_AVX2, FT_FP32, tile_mxfp4_fp32_avx2, NULL, 0, 0, NULL, NULL, NULL, 0},
    {FT_AVX2, FT_INT8, tile_mxfp4_int8_avx2, ft_nibble_order_int8, 12, .5f, NULL, NULL, NULL, 0},
    {FT_AVX2, FT_INT15, tile_mxfp4_int15_avx2, ft_nibble_order_int8, 12, .5f, few_mxfp4_int15_avx2, NULL, NULL, 0},
    {FT_AVX512, FT_FP32, tile_mxfp4_fp32_avx512, NULL, 0, 0, NULL, NULL, NULL, 0},
    {FT_AVX512VNNI, FT_INT8, tile_mxfp4_int8_vnni, ft_nibble_order_int8, 12, .5f, NULL, NULL, NULL, 0},
    {FT_AVX512VNNI, FT_INT15, tile_mxfp4_int15_vnni, ft_nibble_order_int8, 12, .5f, few_mxfp4_int15_vnni, NULL, NULL, 0},
    {FT_AVX512BF16, FT_BF16, tile_mxfp4_bf16_avx512bf16, ft_nibble_order_bf16, 0, 0, NULL, NULL, NULL, 0},
    {FT_AMX, FT_INT15, tile_mxfp4_int15_vnni, ft_nibble_order_int8, 12, .5f, few_mxfp4_int15_vnni,
     many_mxfp4_int15_amx, ft_nibble_order_bf16, FT_INT15_MANY_FROM},
#endif
    {FT_LEVELS, 0, NULL, NULL, 0, 0, NULL, NULL, NULL, 0},
};
#endif
