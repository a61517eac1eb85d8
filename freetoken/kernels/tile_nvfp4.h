/* nvfp4 tiles: a block is 16 weights: 16 e4m3 scales, 2 lines of e2m1 codes (144 bytes).
 *
 * Scales come from e4m3.h times 2^-8; the 2^8 is one multiplication at the end of a tile. The matrix's global scale is
 * not applied here.
 *
 * The versions are those of tile_mxfp4.h.
 */
#ifndef FREETOKEN_TILE_NVFP4_H
#define FREETOKEN_TILE_NVFP4_H
#include "e2m1.h"
#include "e4m3.h"

enum { NVFP4_BLOCK = 16, NVFP4_BYTES = 144 };

static void tile_nvfp4_fp32_scalar(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const float *x = xv;
    float sum[16] = {0};
    for (ptrdiff_t b = 0; b < k / NVFP4_BLOCK; b++, w += NVFP4_BYTES, x += NVFP4_BLOCK) {
        float part[16] = {0};
        for (int line = 0; line < 2; line++) ft_nibble_line_fp32(&ft_e2m1, w + 16 + 64 * line, x + 8 * line, part);
        for (int row = 0; row < 16; row++) sum[row] += part[row] * ft_e4m3(w[row]);
    }
    memcpy(y, sum, sizeof sum);
}

static void tile_nvfp4_int8_scalar(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const int8_t *x = xv;
    const float *scale = ft_int8_scales(xv, k);
    float sum[16] = {0};
    for (ptrdiff_t b = 0; b < k / NVFP4_BLOCK; b++, w += NVFP4_BYTES, x += NVFP4_BLOCK) {
        int32_t part[16] = {0};
        for (int line = 0; line < 2; line++) ft_nibble_line_int8(&ft_e2m1, w + 16 + 64 * line, x + 8 * line, part);
        for (int row = 0; row < 16; row++) sum[row] += (float)part[row] * scale[b] * ft_e4m3(w[row]);
    }
    memcpy(y, sum, sizeof sum);
}

static void tile_nvfp4_int15_scalar(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const int8_t *x = xv;
    const float *scale = ft_int8_scales(xv, 2 * k);
    float sum[16] = {0};
    for (ptrdiff_t b = 0; b < k / NVFP4_BLOCK; b++, w += NVFP4_BYTES, x += NVFP4_BLOCK) {
        int32_t part[16] = {0};
        for (int line = 0; line < 2; line++)
            ft_nibble_line_int15(&ft_e2m1, w + 16 + 64 * line, x + 8 * line, x + k + 8 * line, part);
        for (int row = 0; row < 16; row++) sum[row] += (float)part[row] * scale[b] * ft_e4m3(w[row]);
    }
    memcpy(y, sum, sizeof sum);
}

#ifdef FT_X86
FT_TARGET_AVX2 static void tile_nvfp4_fp32_avx2(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const float *x = xv;
    __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (ptrdiff_t b = 0; b < k / NVFP4_BLOCK; b++, w += NVFP4_BYTES, x += NVFP4_BLOCK) {
        FT_PREFETCH(w);
        FT_PREFETCH(w + 64);
        for (int h = 0; h < 2; h++) {
            __m256 s0 = _mm256_setzero_ps(), s1 = s0;
            for (int line = 0; line < 2; line++) ft_e2m1_half_avx2(w + 16 + 64 * line + 32 * h, x + 8 * line, &s0, &s1);
            sum[h] = _mm256_fmadd_ps(_mm256_add_ps(s0, s1), ft_e4m3_avx2(w + 8 * h), sum[h]);
        }
    }
    _mm256_storeu_ps(y, _mm256_mul_ps(sum[0], _mm256_set1_ps(256.f)));
    _mm256_storeu_ps(y + 8, _mm256_mul_ps(sum[1], _mm256_set1_ps(256.f)));
}

FT_TARGET_AVX2 static void tile_nvfp4_int8_avx2(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const int8_t *x = xv;
    const float *scale = ft_int8_scales(xv, k);
    const int32_t *correction = ft_int8_corrections(xv, k, k / NVFP4_BLOCK);
    __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (ptrdiff_t b = 0; b < k / NVFP4_BLOCK; b++, w += NVFP4_BYTES, x += NVFP4_BLOCK) {
        FT_PREFETCH(w);
        FT_PREFETCH(w + 64);
        __m256i total[2] = {_mm256_set1_epi32(correction[b]), _mm256_set1_epi32(correction[b])};
        ft_nibble_two_int8_avx2(&ft_e2m1, w + 16, x, total);
        for (int h = 0; h < 2; h++) {
            __m256 part = _mm256_mul_ps(_mm256_cvtepi32_ps(total[h]), _mm256_set1_ps(scale[b]));
            sum[h] = _mm256_fmadd_ps(part, ft_e4m3_avx2(w + 8 * h), sum[h]);
        }
    }
    _mm256_storeu_ps(y, _mm256_mul_ps(sum[0], _mm256_set1_ps(256.f)));
    _mm256_storeu_ps(y + 8, _mm256_mul_ps(sum[1], _mm256_set1_ps(256.f)));
}

FT_TARGET_AVX2 FT_BODY tiles_nvfp4_int15_avx2(const uint8_t *w, ptrdiff_t k, const void *const *x, float *y, int n) {
    const ptrdiff_t blocks = k / NVFP4_BLOCK;
    __m256 sum[FT_FEW][2];
    for (int t = 0; t < n; t++) sum[t][0] = sum[t][1] = _mm256_setzero_ps();
    for (ptrdiff_t b = 0; b < blocks; b++, w += NVFP4_BYTES) {
        FT_PREFETCH(w);
        FT_PREFETCH(w + 64);
        __m256i total[FT_FEW][2];
        ft_begin_int15_avx2(x, k, blocks, b, n, total);
        ft_nibble_two_int15_avx2(&ft_e2m1, w + 16, x, k, b * NVFP4_BLOCK, n, total);
        for (int t = 0; t < n; t++)
            for (int h = 0; h < 2; h++) {
                const __m256 part = ft_end_int15_avx2(x[t], k, b, total[t][h]);
                sum[t][h] = _mm256_fmadd_ps(part, ft_e4m3_avx2(w + 8 * h), sum[t][h]);
            }
    }
    for (int t = 0; t < n; t++)
        for (int h = 0; h < 2; h++) _mm256_storeu_ps(y + 16 * t + 8 * h, _mm256_mul_ps(sum[t][h], _mm256_set1_ps(256.f)));
}
FT_TILE_AND_FOUR(FT_TARGET_AVX2, nvfp4_int15_avx2)

FT_TARGET_AVX512 static void tile_nvfp4_fp32_avx512(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const float *x = xv;
    __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}; /* two chains: even and odd blocks */
    for (ptrdiff_t b = 0; b < k / NVFP4_BLOCK; b++, w += NVFP4_BYTES, x += NVFP4_BLOCK) {
        FT_PREFETCH(w);
        FT_PREFETCH(w + 64);
        __m512 s[4];
        for (int i = 0; i < 4; i++) s[i] = _mm512_setzero_ps();
        ft_nibble_line_avx512(&ft_e2m1, w + 16, x, &s[0], &s[1]);
        ft_nibble_line_avx512(&ft_e2m1, w + 80, x + 8, &s[2], &s[3]);
        __m512 part = _mm512_add_ps(_mm512_add_ps(s[0], s[1]), _mm512_add_ps(s[2], s[3]));
        sum[b & 1] = _mm512_fmadd_ps(part, ft_e4m3_avx512(w), sum[b & 1]);
    }
    _mm512_storeu_ps(y, _mm512_mul_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_set1_ps(256.f)));
}

FT_TARGET_VNNI static void tile_nvfp4_int8_vnni(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const int8_t *x = xv;
    const float *scale = ft_int8_scales(xv, k);
    const int32_t *correction = ft_int8_corrections(xv, k, k / NVFP4_BLOCK);
    __m512 sum = _mm512_setzero_ps();
    for (ptrdiff_t b = 0; b < k / NVFP4_BLOCK; b++, w += NVFP4_BYTES, x += NVFP4_BLOCK) {
        FT_PREFETCH(w);
        FT_PREFETCH(w + 64);
        __m512i s0 = _mm512_set1_epi32(correction[b]), s1 = _mm512_setzero_si512();
        ft_nibble_line_vnni(&ft_e2m1, w + 16, x, &s0, &s1);
        ft_nibble_line_vnni(&ft_e2m1, w + 80, x + 8, &s0, &s1);
        __m512 part = _mm512_cvtepi32_ps(_mm512_add_epi32(s0, s1));
        sum = _mm512_fmadd_ps(_mm512_mul_ps(part, _mm512_set1_ps(scale[b])), ft_e4m3_avx512(w), sum);
    }
    _mm512_storeu_ps(y, _mm512_mul_ps(sum, _mm512_set1_ps(256.f)));
}

FT_TARGET_VNNI FT_BODY tiles_nvfp4_int15_vnni(const uint8_t *w, ptrdiff_t k, const void *const *x, float *y,
                                            int n) {
    const ptrdiff_t blocks = k / NVFP4_BLOCK;
    __m512 sum[FT_FEW];
    for (int t = 0; t < n; t++) sum[t] = _mm512_setzero_ps();
    for (ptrdiff_t b = 0; b < blocks; b++, w += NVFP4_BYTES) {
        FT_PREFETCH(w);
        FT_PREFETCH(w + 64);
        __m512i high[FT_FEW], low[FT_FEW];
        ft_begin_int15(x, k, blocks, b, n, high, low);
        for (int line = 0; line < 2; line++)
            ft_nibble_line_vnni15(&ft_e2m1, w + 16 + 64 * line, x, k, b * NVFP4_BLOCK + 8 * line, n, high, low);
        const __m512 scale = ft_e4m3_avx512(w);
        for (int t = 0; t < n; t++) {
            const __m512 part = ft_end_int15(x[t], k, b, high[t], low[t]);
            sum[t] = _mm512_fmadd_ps(part, scale, sum[t]);
        }
    }
    for (int t = 0; t < n; t++) _mm512_storeu_ps(y + 16 * t, _mm512_mul_ps(sum[t], _mm512_set1_ps(256.f)));
}
FT_TILE_AND_FEW(FT_TARGET_VNNI, nvfp4_int15_vnni)

FT_TARGET_AMX static inline uint16_t nvfp4_lines_amx(const uint8_t *w, uint8_t *lines, float *scales) {
    FT_PREFETCH(w);
    FT_PREFETCH(w + 64);
    for (int line = 0; line < 2; line++)
        ft_nibble_pairs_avx512(&ft_e2m1, w + 16 + 64 * line, lines + 256 * line);
    memcpy(lines + 512, lines, 512); /* for the low digits */
    _mm512_store_ps(scales, ft_e4m3_avx512(w));
    return 0;
}

FT_TARGET_AMX static void many_nvfp4_int15_amx(const uint8_t *w, ptrdiff_t k, const void *x, ptrdiff_t stride, int n,
                                               float *y) {
    ft_amx_int15(w, k, NVFP4_BLOCK, NVFP4_BYTES, nvfp4_lines_amx, 256.f, x, stride, n, y);
}

FT_TARGET_BF16 static void tile_nvfp4_bf16_avx512bf16(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const uint8_t *x = xv;
    __m512 sum = _mm512_setzero_ps();
    for (ptrdiff_t b = 0; b < k / NVFP4_BLOCK; b++, w += NVFP4_BYTES, x += 2 * NVFP4_BLOCK) {
        FT_PREFETCH(w);
        FT_PREFETCH(w + 64);
        __m512 s0 = _mm512_setzero_ps(), s1 = s0;
        ft_nibble_line_bf16(&ft_e2m1, w + 16, x, &s0, &s1);
        ft_nibble_line_bf16(&ft_e2m1, w + 80, x + 16, &s0, &s1);
        sum = _mm512_fmadd_ps(_mm512_add_ps(s0, s1), ft_e4m3_avx512(w), sum);
    }
    _mm512_storeu_ps(y, _mm512_mul_ps(sum, _mm512_set1_ps(256.f)));
}
#endif

static const ft_kernel ft_kernels_nvfp4[] = {
    {FT_SCALAR, FT_FP32, tile_nvfp4_fp32_scalar, NULL, 0, 0, NULL, NULL, NULL, 0},
    {FT_SCALAR, FT_INT8, tile_nvfp4_int8_scalar, ft_nibble_order_int8, 12, .5f, NULL, NULL, NULL, 0},
    {FT_SCALAR, FT_INT15, tile_nvfp4_int15_scalar, ft_nibble_order_int8, 12, .5f, NULL, NULL, NULL, 0},
#ifdef FT_X86
    {FT_AVX2, FT_FP32, tile_nvfp4_fp32_avx2, NULL, 0, 0, NULL, NULL, NULL, 0},
    {FT_AVX2, FT_INT8, tile_nvfp4_int8_avx2, ft_nibble_order_int8, 12, .5f, NULL, NULL, NULL, 0},
    {FT_AVX2, FT_INT15, tile_nvfp4_int15_avx2, ft_nibble_order_int8, 12, .5f, few_nvfp4_int15_avx2, NULL, NULL, 0},
    {FT_AVX512, FT_FP32, tile_nvfp4_fp32_avx512, NULL, 0, 0, NULL, NULL, NULL, 0},
    {FT_AVX512VNNI, FT_INT8, tile_nvfp4_int8_vnni, ft_nibble_order_int8, 12, .5f, NULL, NULL, NULL, 0},
    {FT_AVX512VNNI, FT_INT15, tile_nvfp4_int15_vnni, ft_nibble_order_int8, 12, .5f, few_nvfp4_int15_vnni, NULL, NULL, 0},
    {FT_AVX512BF16, FT_BF16, tile_nvfp4_bf16_avx512bf16, ft_nibble_order_bf16, 0, 0, NULL, NULL, NULL, 0},
    {FT_AMX, FT_INT15, tile_nvfp4_int15_vnni, ft_nibble_order_int8, 12, .5f, few_nvfp4_int15_vnni,
     many_nvfp4_int15_amx, ft_nibble_order_bf16, FT_INT15_MANY_FROM},
#endif
    {FT_LEVELS, 0, NULL, NULL, 0, 0, NULL, NULL, NULL, 0},
};
#endif
