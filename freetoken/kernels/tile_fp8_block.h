/* fp8_block tiles: a block is 128 weights: 16 fp32 scales (one line), 32 lines of e4m3 codes (2112 bytes). The last
 * block of a tile may have fewer lines.
 *
 * A line is 4 weights of 16 rows. As 16-bit halves its lanes hold weights (0,1) (2,3); each weight becomes fp16 times
 * 2^-8 (e4m3.h) where it stands, so a register of halves converts to fp32 in pairs of a row: weights 0 and 2, then
 * 1 and 3. Activations stand in that order and are broadcast in pairs; a block's two sums of a row meet at its end,
 * are multiplied by 2^8 and then by the scale, so that only a result that is itself tiny is ever subnormal.
 *
 * scalar   the definition
 * avx2     4 rows a register
 * avx512   8 rows a register
 *
 * There is no version for bf16 dots: an e4m3 code moved into bf16 may be a subnormal, which VDPBF16PS takes for zero.
 * Repaired by a table of 128 entries (VPERMI2W) it read 56 GB/s from L2 on one core of a 2-core Zen 5, by replacing the
 * subnormals 53, this one 48 with exact activations; memory gives that core 26. int8 activations have none either.
 */
#ifndef FREETOKEN_TILE_FP8_BLOCK_H
#define FREETOKEN_TILE_FP8_BLOCK_H
#include "e4m3.h"

enum { FP8_BLOCK = 128 };

static const uint8_t fp8_block_order[4] = {0, 2, 1, 3}; /* weight k stands at order[k]: 0 2 1 3 */

static inline ptrdiff_t fp8_block_lines(ptrdiff_t k) { return (k < FP8_BLOCK ? k : FP8_BLOCK) / 4; }

static void tile_fp8_block_fp32_scalar(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const float *x = xv;
    float sum[16] = {0};
    for (; k > 0; k -= FP8_BLOCK) {
        float part[16] = {0};
        const uint8_t *scale = w;
        w += 64;
        for (ptrdiff_t line = fp8_block_lines(k); line > 0; line--, w += 64, x += 4)
            for (int row = 0; row < 16; row++)
                for (int i = 0; i < 4; i++) part[row] += ft_e4m3(w[4 * row + i]) * x[i];
        for (int row = 0; row < 16; row++) sum[row] += part[row] * ft_bits_to_float(ft_load32(scale + 4 * row));
    }
    memcpy(y, sum, sizeof sum);
}

#ifdef FT_X86
FT_TARGET_AVX2 static void tile_fp8_block_fp32_avx2(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const float *x = xv;
    const __m256i keep = _mm256_set1_epi16((short)0xbf80);
    __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()}; /* rows 0-7, 8-15 */
    for (; k > 0; k -= FP8_BLOCK) {
        __m256 s[4]; /* pairs of sums of rows 0-3, 4-7, 8-11, 12-15 */
        for (int i = 0; i < 4; i++) s[i] = _mm256_setzero_ps();
        const uint8_t *scale = w;
        w += 64;
        for (ptrdiff_t line = fp8_block_lines(k); line > 0; line--, w += 64, x += 4) {
            FT_PREFETCH(w);
            __m256 x02 = _mm256_castsi256_ps(_mm256_broadcastq_epi64(_mm_loadl_epi64((const void *)x)));
            __m256 x13 = _mm256_castsi256_ps(_mm256_broadcastq_epi64(_mm_loadl_epi64((const void *)(x + 2))));
            for (int h = 0; h < 2; h++) {
                __m256i v = _mm256_loadu_si256((const void *)(w + 32 * h));
                __m256i even = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 1), keep);
                __m256i odd = _mm256_and_si256(_mm256_srai_epi16(v, 1), keep);
                __m256 *a = &s[2 * h], *b = &s[2 * h + 1];
                *a = _mm256_fmadd_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(even)), x02, *a);
                *b = _mm256_fmadd_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(even, 1)), x02, *b);
                *a = _mm256_fmadd_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(odd)), x13, *a);
                *b = _mm256_fmadd_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(odd, 1)), x13, *b);
            }
        }
        for (int h = 0; h < 2; h++) {
            __m256d rows = _mm256_castps_pd(_mm256_hadd_ps(s[2 * h], s[2 * h + 1])); /* rows 0 1 4 5 2 3 6 7 */
            __m256 part = _mm256_castpd_ps(_mm256_permute4x64_pd(rows, 0xd8));
            part = _mm256_mul_ps(part, _mm256_set1_ps(256.f));
            sum[h] = _mm256_fmadd_ps(part, _mm256_loadu_ps((const float *)(scale + 32 * h)), sum[h]);
        }
    }
    _mm256_storeu_ps(y, sum[0]);
    _mm256_storeu_ps(y + 8, sum[1]);
}

/* The two sums of each row, in order, times 2^8. */
FT_TARGET_AVX512 static inline __m512 fp8_block_rows_avx512(__m512 low, __m512 high) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    __m512 sum = _mm512_add_ps(_mm512_permutex2var_ps(low, even, high), _mm512_permutex2var_ps(low, odd, high));
    return _mm512_mul_ps(sum, _mm512_set1_ps(256.f));
}

FT_TARGET_AVX512 FT_BODY tiles_fp8_block_fp32_avx512(const uint8_t *w, ptrdiff_t k, const void *const *x, float *y,
                                            int n) {
    const __m512i keep = _mm512_set1_epi16((short)0xbf80);
    __m512 sum[FT_FEW];
    ptrdiff_t at = 0;
    for (int t = 0; t < n; t++) sum[t] = _mm512_setzero_ps();
    for (; k > 0; k -= FP8_BLOCK) {
        __m512 s[FT_FEW][4]; /* pairs of sums: rows 0-7 and 8-15 of weights 0 and 2, then of 1 and 3 */
        for (int t = 0; t < n; t++)
            for (int i = 0; i < 4; i++) s[t][i] = _mm512_setzero_ps();
        const uint8_t *scale = w;
        w += 64;
        for (ptrdiff_t line = fp8_block_lines(k); line > 0; line--, w += 64, at += 4) {
            FT_PREFETCH(w);
            __m512i v = _mm512_loadu_si512(w);
            __m512i even = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(v, 8), 1), keep);
            __m512i odd = _mm512_and_si512(_mm512_srai_epi16(v, 1), keep);
            const __m512 value[4] = {
                _mm512_cvtph_ps(_mm512_castsi512_si256(even)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(even, 1)),
                _mm512_cvtph_ps(_mm512_castsi512_si256(odd)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(odd, 1))};
            for (int t = 0; t < n; t++) {
                const float *xt = (const float *)x[t] + at;
                __m512 x02 = _mm512_castsi512_ps(_mm512_broadcastq_epi64(_mm_loadl_epi64((const void *)xt)));
                __m512 x13 = _mm512_castsi512_ps(_mm512_broadcastq_epi64(_mm_loadl_epi64((const void *)(xt + 2))));
                for (int i = 0; i < 4; i++) s[t][i] = _mm512_fmadd_ps(value[i], i < 2 ? x02 : x13, s[t][i]);
            }
        }
        for (int t = 0; t < n; t++) {
            __m512 part = fp8_block_rows_avx512(_mm512_add_ps(s[t][0], s[t][2]), _mm512_add_ps(s[t][1], s[t][3]));
            sum[t] = _mm512_fmadd_ps(part, _mm512_loadu_ps(scale), sum[t]);
        }
    }
    for (int t = 0; t < n; t++) _mm512_storeu_ps(y + 16 * t, sum[t]);
}
FT_TILE_AND_FEW(FT_TARGET_AVX512, fp8_block_fp32_avx512)
#endif

static const ft_kernel ft_kernels_fp8_block[] = {
    {FT_SCALAR, FT_FP32, tile_fp8_block_fp32_scalar, NULL, 0, 0, NULL},
#ifdef FT_X86
    {FT_AVX2, FT_FP32, tile_fp8_block_fp32_avx2, fp8_block_order, 0, 0, NULL},
    {FT_AVX512, FT_FP32, tile_fp8_block_fp32_avx512, fp8_block_order, 0, 0, few_fp8_block_fp32_avx512},
#endif
    {FT_LEVELS, 0, NULL, NULL, 0, 0, NULL},
};
#endif
