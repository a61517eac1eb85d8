/* bf16 tiles: a line is 2 weights of 16 rows; no scales. A "block" is one line.
 *
 * scalar   the definition
 * avx2     fp32 activations, both weights of a lane widened by shift and mask
 * avx512   the same, 16 rows at once
 * bf16     VDPBF16PS takes a line as it lies. It treats a subnormal weight, activation or sum as zero (below 2^-126).
 * amx      so does TDPBF16PS, with many vectors; one or few are multiplied by AVX-512 in its order of sums
 */
#ifndef FREETOKEN_TILE_BF16_H
#define FREETOKEN_TILE_BF16_H
#include "amx.h"

static void tile_bf16_fp32_scalar(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const float *x = xv;
    float sum[16] = {0};
    for (ptrdiff_t b = 0; b < k / 2; b++, w += 64)
        for (int row = 0; row < 16; row++) {
            uint32_t lane = ft_load32(w + 4 * row);
            sum[row] += ft_bits_to_float(lane << 16) * x[2 * b];
            sum[row] += ft_bits_to_float(lane & 0xffff0000u) * x[2 * b + 1];
        }
    memcpy(y, sum, sizeof sum);
}

#ifdef FT_X86
FT_TARGET_AVX2 static void tile_bf16_fp32_avx2(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const float *x = xv;
    const __m256i high = _mm256_set1_epi32((int)0xffff0000u);
    __m256 a0 = _mm256_setzero_ps(), a1 = a0, b0 = a0, b1 = a0; /* a: rows 0-7, b: rows 8-15 */
    for (ptrdiff_t b = 0; b < k / 2; b++, w += 64) {
        FT_PREFETCH(w);
        __m256 x0 = _mm256_broadcast_ss(x + 2 * b), x1 = _mm256_broadcast_ss(x + 2 * b + 1);
        __m256i v = _mm256_loadu_si256((const void *)w), u = _mm256_loadu_si256((const void *)(w + 32));
        a0 = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(v, 16)), x0, a0);
        a1 = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(v, high)), x1, a1);
        b0 = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(u, 16)), x0, b0);
        b1 = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(u, high)), x1, b1);
    }
    _mm256_storeu_ps(y, _mm256_add_ps(a0, a1));
    _mm256_storeu_ps(y + 8, _mm256_add_ps(b0, b1));
}

FT_TARGET_AVX512 static void tile_bf16_fp32_avx512(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const float *x = xv;
    const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
    __m512 s0 = _mm512_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
    ptrdiff_t b = 0;
    for (; b + 2 <= k / 2; b += 2, w += 128, x += 4) {
        FT_PREFETCH(w);
        FT_PREFETCH(w + 64);
        __m512i v = _mm512_loadu_si512(w), u = _mm512_loadu_si512(w + 64);
        s0 = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)), _mm512_set1_ps(x[0]), s0);
        s1 = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(v, high)), _mm512_set1_ps(x[1]), s1);
        s2 = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(u, 16)), _mm512_set1_ps(x[2]), s2);
        s3 = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(u, high)), _mm512_set1_ps(x[3]), s3);
    }
    if (b < k / 2) {
        __m512i v = _mm512_loadu_si512(w);
        s0 = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)), _mm512_set1_ps(x[0]), s0);
        s1 = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(v, high)), _mm512_set1_ps(x[1]), s1);
    }
    _mm512_storeu_ps(y, _mm512_add_ps(_mm512_add_ps(s0, s1), _mm512_add_ps(s2, s3)));
}

FT_TARGET_BF16 FT_BODY tiles_bf16_bf16_avx512bf16(const uint8_t *w, ptrdiff_t k, const void *const *x, float *y,
                                            int n) {
    __m512 s[FT_FEW][4];
    for (int t = 0; t < n; t++)
        for (int i = 0; i < 4; i++) s[t][i] = _mm512_setzero_ps();
#define FT_STEP(i)                                                                                                   \
    do {                                                                                                             \
        const __m512bh line = (__m512bh)_mm512_loadu_si512(w + 64 * (i));                                            \
        for (int t = 0; t < n; t++)                                                                                  \
            s[t][i] = _mm512_dpbf16_ps(                                                                              \
                s[t][i], line, (__m512bh)_mm512_set1_epi32((int)ft_load32((const uint8_t *)x[t] + 4 * (b + (i)))));   \
    } while (0)
    ptrdiff_t b = 0;
    for (; b + 4 <= k / 2; b += 4, w += 256)
        for (int i = 0; i < 4; i++) {
            FT_PREFETCH(w + 64 * i);
            FT_STEP(i);
        }
    for (; b < k / 2; b++, w += 64) FT_STEP(0);
#undef FT_STEP
    for (int t = 0; t < n; t++)
        _mm512_storeu_ps(y + 16 * t, _mm512_add_ps(_mm512_add_ps(s[t][0], s[t][1]), _mm512_add_ps(s[t][2], s[t][3])));
}
FT_TILE_AND_FEW(FT_TARGET_BF16, bf16_bf16_avx512bf16)

FT_TARGET_AVX512 FT_BODY tiles_bf16_bf16_amx(const uint8_t *w, ptrdiff_t k, const void *const *x, float *y, int n) {
    const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
    _Alignas(64) float wide[FT_FEW][32];
    const uint32_t before = ft_flush_begin();
    __m512 sum[FT_FEW];
    for (int t = 0; t < n; t++) sum[t] = _mm512_setzero_ps();
    for (ptrdiff_t at = 0; at < k; at += 32) {
        const ptrdiff_t rest = k - at < 32 ? k - at : 32;
        __m512 first[FT_FEW], second[FT_FEW];
        for (int t = 0; t < n; t++) {
            ft_widen_bf16((const uint8_t *)x[t] + 2 * at, rest, wide[t]);
            first[t] = second[t] = _mm512_setzero_ps();
        }
        for (ptrdiff_t i = 0; i < rest; i += 2, w += 64) {
            FT_PREFETCH(w);
            const __m512i line = _mm512_loadu_si512(w);
            for (int t = 0; t < n; t++) {
                first[t] = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(line, 16)), _mm512_set1_ps(wide[t][i]),
                                           first[t]);
                second[t] = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(line, high)),
                                            _mm512_set1_ps(wide[t][i + 1]), second[t]);
            }
        }
        for (int t = 0; t < n; t++) sum[t] = _mm512_add_ps(sum[t], _mm512_add_ps(first[t], second[t]));
    }
    for (int t = 0; t < n; t++) _mm512_storeu_ps(y + 16 * t, sum[t]);
    ft_flush_end(before, y);
}
FT_TILE_AND_FEW(FT_TARGET_AVX512, bf16_bf16_amx)

FT_TARGET_AMX static void many_bf16_bf16_amx(const uint8_t *w, ptrdiff_t k, const void *x, ptrdiff_t stride, int n,
                                             float *y) {
    const ft_sets s = ft_make_sets(n);
    ft_shapes shapes;
    float *sums[4] = {y, y, y, y};
    for (int set = 0; set < s.sets; set++) sums[set] = y + 16 * ft_set_start(s, set);
    ft_shape_bf16(&shapes, s, k);
    FT_TILES_SHAPE(&shapes);
    ft_amx_bf16(w, k / 2, x, stride, s, 1, sums);
    FT_TILES_RELEASE();
}
#endif

static const ft_kernel ft_kernels_bf16[] = {
    {FT_SCALAR, FT_FP32, tile_bf16_fp32_scalar, NULL, 0, 0, NULL, NULL, NULL, 0},
#ifdef FT_X86
    {FT_AVX2, FT_FP32, tile_bf16_fp32_avx2, NULL, 0, 0, NULL, NULL, NULL, 0},
    {FT_AVX512, FT_FP32, tile_bf16_fp32_avx512, NULL, 0, 0, NULL, NULL, NULL, 0},
    {FT_AVX512BF16, FT_BF16, tile_bf16_bf16_avx512bf16, NULL, 0, 0, few_bf16_bf16_avx512bf16, NULL, NULL, 0},
    {FT_AMX, FT_BF16, tile_bf16_bf16_amx, NULL, 0, 0, few_bf16_bf16_amx, many_bf16_bf16_amx, NULL,
     FT_FEW + 1},
#endif
    {FT_LEVELS, 0, NULL, NULL, 0, 0, NULL, NULL, NULL, 0},
};
#endif
