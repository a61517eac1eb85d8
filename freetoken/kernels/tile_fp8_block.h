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
 * bf16     VDPBF16PS with bf16 activations: a line becomes two of bf16, values times 2^-8. What is subnormal in e4m3
 *          would stay so where it stands, and be taken for zero: a table has those. From L2, one Zen 5 core: 52 GB/s for
 *          one token and 11.1 us a tile for 64 (avx512: 46, 17.1); a table of all codes 46 GB/s, by way of fp32 39
 * amx      bf16 activations: a line becomes two of bf16, values times 2^-8, which are never subnormal, weights 0 and 2
 *          of a row, then 1 and 3; one or few vectors are multiplied by AVX-512 in the matrix unit's order of sums
 *
 * int8 activations have none.
 */
#ifndef FREETOKEN_TILE_FP8_BLOCK_H
#define FREETOKEN_TILE_FP8_BLOCK_H
#include "amx.h"
#include "e4m3.h"

enum { FP8_BLOCK = 128, FP8_BLOCK_BYTES = 64 + 16 * FP8_BLOCK };

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

/* The two sums of each row, in order, added. */
FT_TARGET_AVX512 static inline __m512 fp8_block_rows_avx512(__m512 low, __m512 high) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return _mm512_add_ps(_mm512_permutex2var_ps(low, even, high), _mm512_permutex2var_ps(low, odd, high));
}

/* A block's 16 sums take their scales. */
FT_TARGET_AVX512 static inline __m512 fp8_block_end_avx512(__m512 part, const uint8_t *scale, __m512 sum) {
    return _mm512_fmadd_ps(_mm512_mul_ps(part, _mm512_set1_ps(256.f)), _mm512_loadu_ps(scale), sum);
}

/* A line's values times 2^-8: rows 0-7 and 8-15 of weights 0 and 2, then of 1 and 3. */
FT_TARGET_AVX512 static inline void fp8_block_line_avx512(const uint8_t *w, __m512 *value) {
    const __m512i keep = _mm512_set1_epi16((short)0xbf80), v = _mm512_loadu_si512(w);
    const __m512i even = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(v, 8), 1), keep);
    const __m512i odd = _mm512_and_si512(_mm512_srai_epi16(v, 1), keep);
    value[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(even));
    value[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(even, 1));
    value[2] = _mm512_cvtph_ps(_mm512_castsi512_si256(odd));
    value[3] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(odd, 1));
}

/* A pair of activations in all pairs of lanes. */
FT_TARGET_AVX512 static inline __m512 fp8_block_pair_avx512(const float *x) {
    return _mm512_castsi512_ps(_mm512_broadcastq_epi64(_mm_loadl_epi64((const void *)x)));
}

FT_TARGET_AVX512 FT_BODY tiles_fp8_block_fp32_avx512(const uint8_t *w, ptrdiff_t k, const void *const *x, float *y,
                                            int n) {
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
            __m512 value[4];
            fp8_block_line_avx512(w, value);
            for (int t = 0; t < n; t++) {
                const float *xt = (const float *)x[t] + at;
                const __m512 x02 = fp8_block_pair_avx512(xt), x13 = fp8_block_pair_avx512(xt + 2);
                for (int i = 0; i < 4; i++) s[t][i] = _mm512_fmadd_ps(value[i], i < 2 ? x02 : x13, s[t][i]);
            }
        }
        for (int t = 0; t < n; t++) {
            const __m512 part = fp8_block_rows_avx512(_mm512_add_ps(s[t][0], s[t][2]), _mm512_add_ps(s[t][1], s[t][3]));
            sum[t] = fp8_block_end_avx512(part, scale, sum[t]);
        }
    }
    for (int t = 0; t < n; t++) _mm512_storeu_ps(y + 16 * t, sum[t]);
}
FT_TILE_AND_FEW(FT_TARGET_AVX512, fp8_block_fp32_avx512)

/* n vectors with a block's decoded lines. */
FT_TARGET_AVX512 FT_BODY fp8_block_vectors_avx512(const __m512 (*value)[4], ptrdiff_t lines, const uint8_t *scale,
                                                  const uint8_t *x, ptrdiff_t stride, float (*sums)[16], int n) {
    __m512 s[FT_FEW][4];
    for (int t = 0; t < n; t++)
        for (int i = 0; i < 4; i++) s[t][i] = _mm512_setzero_ps();
    for (ptrdiff_t line = 0; line < lines; line++)
        for (int t = 0; t < n; t++) {
            const float *xt = (const float *)(x + t * stride) + 4 * line;
            const __m512 x02 = fp8_block_pair_avx512(xt), x13 = fp8_block_pair_avx512(xt + 2);
            for (int i = 0; i < 4; i++) s[t][i] = _mm512_fmadd_ps(value[line][i], i < 2 ? x02 : x13, s[t][i]);
        }
    for (int t = 0; t < n; t++) {
        const __m512 part = fp8_block_rows_avx512(_mm512_add_ps(s[t][0], s[t][2]), _mm512_add_ps(s[t][1], s[t][3]));
        _mm512_store_ps(sums[t], fp8_block_end_avx512(part, scale, _mm512_load_ps(sums[t])));
    }
}

/* A block is decoded once for all vectors, which takes a tenth less than once for every four (one Zen 5 core, 64). */
FT_TARGET_AVX512 static void many_fp8_block_fp32_avx512(const uint8_t *w, ptrdiff_t k, const void *xv, ptrdiff_t stride,
                                                        int n, float *y) {
    __m512 value[FP8_BLOCK / 4][4];
    _Alignas(64) float sums[FT_MANY][16] = {0};
    const uint8_t *x = xv;
    for (; k > 0; k -= FP8_BLOCK, x += 4 * FP8_BLOCK) {
        const ptrdiff_t lines = fp8_block_lines(k);
        const uint8_t *scale = w;
        w += 64;
        for (ptrdiff_t line = 0; line < lines; line++, w += 64) {
            FT_PREFETCH(w);
            fp8_block_line_avx512(w, value[line]);
        }
        int t = 0;
        for (; t + FT_FEW <= n; t += FT_FEW)
            fp8_block_vectors_avx512(value, lines, scale, x + t * stride, stride, sums + t, FT_FEW);
        for (; t < n; t++) fp8_block_vectors_avx512(value, lines, scale, x + t * stride, stride, sums + t, 1);
    }
    memcpy(y, sums, (size_t)n * sizeof *sums);
}

/* The values of codes 0 to 7 times 2^-8, which are subnormal in e4m3, as bf16. */
static const _Alignas(64) uint16_t fp8_block_small[32] = {0, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860};

/* Magnitudes times 2^-8 of the lower bytes of halves: other codes are bf16 where they stand, with another exponent. */
FT_TARGET_BF16 static inline __m512i fp8_block_magnitude_bf16(__m512i code) {
    const __m512i bits = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x7f)), 4);
    const __m512i value = _mm512_add_epi16(bits, _mm512_set1_epi16((127 - 7 - 8) << 7));
    const __mmask32 small = _mm512_cmplt_epu16_mask(bits, _mm512_set1_epi16(8 << 4));
    return _mm512_mask_permutexvar_epi16(value, small, code, _mm512_load_si512(fp8_block_small));
}

/* A line as two of pairs of bf16, which hold its values times 2^-8 exactly. */
FT_TARGET_BF16 static inline void fp8_block_pairs_bf16(const uint8_t *w, __m512bh *pair) {
    const __m512i v = _mm512_loadu_si512(w), sign = _mm512_set1_epi16((short)0x8000);
    const __m512i even = fp8_block_magnitude_bf16(v), odd = fp8_block_magnitude_bf16(_mm512_srli_epi16(v, 8));
    enum { OR_AND = 0xf8 }; /* a | b & c */
    pair[0] = (__m512bh)_mm512_ternarylogic_epi32(even, _mm512_slli_epi16(v, 8), sign, OR_AND);
    pair[1] = (__m512bh)_mm512_ternarylogic_epi32(odd, v, sign, OR_AND);
}

/* A line times n vectors, into the sums of even or of odd lines; x: the line's activations of the first. */
FT_TARGET_BF16 FT_BODY fp8_block_step_bf16(const __m512bh *pair, const uint8_t *const *x, ptrdiff_t at, __m512 (*s)[2],
                                           int n) {
    for (int t = 0; t < n; t++)
        for (int i = 0; i < 2; i++)
            s[t][i] = _mm512_dpbf16_ps(s[t][i], pair[i],
                                       (__m512bh)_mm512_set1_epi32((int)ft_load32(x[t] + at + 4 * i)));
}

/* A block's four sums of n vectors become their part of the result. */
FT_TARGET_BF16 FT_BODY fp8_block_finish_bf16(__m512 (*even)[2], __m512 (*odd)[2], const uint8_t *scale, __m512 *sum,
                                             int n) {
    for (int t = 0; t < n; t++) {
        const __m512 part = _mm512_add_ps(_mm512_add_ps(even[t][0], even[t][1]), _mm512_add_ps(odd[t][0], odd[t][1]));
        sum[t] = fp8_block_end_avx512(part, scale, sum[t]);
    }
}

FT_TARGET_BF16 FT_BODY tiles_fp8_block_bf16_avx512bf16(const uint8_t *w, ptrdiff_t k, const void *const *xv, float *y,
                                              int n) {
    const uint8_t *const *x = (const uint8_t *const *)xv;
    __m512 sum[FT_FEW];
    ptrdiff_t at = 0;
    for (int t = 0; t < n; t++) sum[t] = _mm512_setzero_ps();
    for (; k > 0; k -= FP8_BLOCK) {
        __m512 s[2][FT_FEW][2];
        for (int t = 0; t < n; t++)
            for (int i = 0; i < 4; i++) s[i / 2][t][i % 2] = _mm512_setzero_ps();
        const ptrdiff_t lines = fp8_block_lines(k);
        const uint8_t *scale = w;
        ptrdiff_t line = 0;
        __m512bh pair[2];
        w += 64;
        for (; line + 2 <= lines; line += 2)
            for (int i = 0; i < 2; i++, w += 64, at += 8) {
                FT_PREFETCH(w);
                fp8_block_pairs_bf16(w, pair);
                fp8_block_step_bf16(pair, x, at, s[i], n);
            }
        if (line < lines) {
            fp8_block_pairs_bf16(w, pair);
            fp8_block_step_bf16(pair, x, at, s[0], n);
            w += 64, at += 8;
        }
        fp8_block_finish_bf16(s[0], s[1], scale, sum, n);
    }
    for (int t = 0; t < n; t++) _mm512_storeu_ps(y + 16 * t, sum[t]);
}
FT_TILE_AND_FEW(FT_TARGET_BF16, fp8_block_bf16_avx512bf16)

/* n vectors, one `stride` behind the other, with a block's decoded lines. */
FT_TARGET_BF16 FT_BODY fp8_block_vectors_bf16(__m512bh (*pair)[2], ptrdiff_t lines, const uint8_t *scale,
                                              const uint8_t *first, ptrdiff_t stride, float (*sums)[16], int n) {
    const uint8_t *x[FT_FEW];
    __m512 s[2][FT_FEW][2], sum[FT_FEW];
    for (int t = 0; t < n; t++) {
        x[t] = first + t * stride;
        sum[t] = _mm512_load_ps(sums[t]);
        for (int i = 0; i < 4; i++) s[i / 2][t][i % 2] = _mm512_setzero_ps();
    }
    ptrdiff_t line = 0;
    for (; line + 2 <= lines; line += 2)
        for (int i = 0; i < 2; i++) fp8_block_step_bf16(pair[line + i], x, 8 * (line + i), s[i], n);
    if (line < lines) fp8_block_step_bf16(pair[line], x, 8 * line, s[0], n);
    fp8_block_finish_bf16(s[0], s[1], scale, sum, n);
    for (int t = 0; t < n; t++) _mm512_store_ps(sums[t], sum[t]);
}

FT_TARGET_BF16 static void many_fp8_block_bf16_avx512bf16(const uint8_t *w, ptrdiff_t k, const void *xv,
                                                          ptrdiff_t stride, int n, float *y) {
    __m512bh pair[FP8_BLOCK / 4][2];
    _Alignas(64) float sums[FT_MANY][16] = {0};
    const uint8_t *x = xv;
    for (; k > 0; k -= FP8_BLOCK, x += 2 * FP8_BLOCK) {
        const ptrdiff_t lines = fp8_block_lines(k);
        const uint8_t *scale = w;
        w += 64;
        for (ptrdiff_t line = 0; line < lines; line++, w += 64) {
            FT_PREFETCH(w);
            fp8_block_pairs_bf16(w, pair[line]);
        }
        int t = 0;
        for (; t + FT_FEW <= n; t += FT_FEW)
            fp8_block_vectors_bf16(pair, lines, scale, x + t * stride, stride, sums + t, FT_FEW);
        for (; t < n; t++) fp8_block_vectors_bf16(pair, lines, scale, x + t * stride, stride, sums + t, 1);
    }
    memcpy(y, sums, (size_t)n * sizeof *sums);
}

FT_TARGET_AVX512 FT_BODY tiles_fp8_block_bf16_amx(const uint8_t *w, ptrdiff_t k, const void *const *x, float *y, int n) {
    enum { BLOCKS = 4 /* whose sums wait for their scales, which may be subnormal, until nothing is flushed */ };
    _Alignas(64) float wide[FT_FEW][32], part[BLOCKS][FT_FEW][16];
    __m512 sum[FT_FEW];
    for (int t = 0; t < n; t++) sum[t] = _mm512_setzero_ps();
    for (ptrdiff_t at = 0; at < k; at += BLOCKS * FP8_BLOCK) {
        const uint8_t *scale = w;
        const int blocks = (int)((k - at < BLOCKS * FP8_BLOCK ? k - at + FP8_BLOCK - 1 : BLOCKS * FP8_BLOCK) / FP8_BLOCK);
        const uint32_t before = ft_flush_begin();
        for (int b = 0; b < blocks; b++) {
            const ptrdiff_t start = at + b * FP8_BLOCK, stop = k - start < FP8_BLOCK ? k : start + FP8_BLOCK;
            __m512 total[FT_FEW];
            for (int t = 0; t < n; t++) total[t] = _mm512_setzero_ps();
            w += 64;
            for (ptrdiff_t i = start; i < stop; i += 32) {
                const ptrdiff_t rest = stop - i < 32 ? stop - i : 32;
                __m512 low[FT_FEW], high[FT_FEW];
                for (int t = 0; t < n; t++) {
                    ft_widen_bf16((const uint8_t *)x[t] + 2 * i, rest, wide[t]);
                    low[t] = high[t] = _mm512_setzero_ps();
                }
                for (ptrdiff_t in = 0; in < rest; in += 4, w += 64) {
                    FT_PREFETCH(w);
                    __m512 value[4];
                    fp8_block_line_avx512(w, value);
                    for (int t = 0; t < n; t++) {
                        const __m512 x02 = fp8_block_pair_avx512(wide[t] + in);
                        const __m512 x13 = fp8_block_pair_avx512(wide[t] + in + 2);
                        low[t] = _mm512_fmadd_ps(value[2], x13, _mm512_fmadd_ps(value[0], x02, low[t]));
                        high[t] = _mm512_fmadd_ps(value[3], x13, _mm512_fmadd_ps(value[1], x02, high[t]));
                    }
                }
                for (int t = 0; t < n; t++) total[t] = _mm512_add_ps(total[t], fp8_block_rows_avx512(low[t], high[t]));
            }
            for (int t = 0; t < n; t++) _mm512_store_ps(part[b][t], total[t]);
        }
        ft_flush_end(before, part);
        for (int b = 0; b < blocks; b++, scale += FP8_BLOCK_BYTES)
            for (int t = 0; t < n; t++) sum[t] = fp8_block_end_avx512(_mm512_load_ps(part[b][t]), scale, sum[t]);
    }
    for (int t = 0; t < n; t++) _mm512_storeu_ps(y + 16 * t, sum[t]);
}
FT_TILE_AND_FEW(FT_TARGET_AVX512, fp8_block_bf16_amx)

/* A line as two of pairs of bf16, which hold its values times 2^-8 exactly: their upper halves. */
FT_TARGET_AVX512 static inline void fp8_block_pairs_avx512(const uint8_t *w, uint8_t *lines) {
    __m512 value[4];
    fp8_block_line_avx512(w, value);
    for (int i = 0; i < 4; i++) {
        const __m512i half = _mm512_srli_epi32(_mm512_castps_si512(value[i]), 16);
        _mm256_store_si256((void *)(lines + 32 * i), _mm512_cvtepi32_epi16(half));
    }
}

FT_TARGET_AMX static void many_fp8_block_bf16_amx(const uint8_t *w, ptrdiff_t k, const void *x, ptrdiff_t stride, int n,
                                                  float *y) {
    _Alignas(64) uint8_t lines[32 * FP8_BLOCK];
    _Alignas(64) float parts[2][FT_MANY][16], sums[FT_MANY][16] = {0}; /* parts: of even and odd blocks */
    const ft_sets s = ft_make_sets(n);
    ft_shapes shapes;
    ft_shape_bf16(&shapes, s, k % FP8_BLOCK);
    FT_TILES_SHAPE(&shapes);
    const uint8_t *scale = w; /* of the block before */
    for (ptrdiff_t at = 0, b = 0; at < k + FP8_BLOCK; at += FP8_BLOCK, b++) {
        const uint8_t *block = w;
        if (at < k) {
            const ptrdiff_t count = fp8_block_lines(k - at);
            w += 64;
            for (ptrdiff_t line = 0; line < count; line++, w += 64) {
                FT_PREFETCH(w);
                fp8_block_pairs_avx512(w, lines + 128 * line);
            }
            float *into[4];
            for (int set = 0; set < 4; set++) into[set] = parts[b & 1][set < s.sets ? ft_set_start(s, set) : 0];
            ft_amx_bf16(lines, 2 * count, (const uint8_t *)x + 2 * at, stride, s, 0, into);
        }
        if (b) /* while the unit multiplies */
            for (int t = 0; t < n; t++)
                _mm512_store_ps(sums[t], fp8_block_end_avx512(_mm512_load_ps(parts[(b - 1) & 1][t]), scale,
                                                              _mm512_load_ps(sums[t])));
        scale = block;
    }
    FT_TILES_RELEASE();
    memcpy(y, sums, (size_t)n * sizeof *sums);
}
#endif

static const ft_kernel ft_kernels_fp8_block[] = {
    {FT_SCALAR, FT_FP32, tile_fp8_block_fp32_scalar, NULL, 0, 0, NULL, NULL, NULL, 0},
#ifdef FT_X86
    {FT_AVX2, FT_FP32, tile_fp8_block_fp32_avx2, fp8_block_order, 0, 0, NULL, NULL, NULL, 0},
    {FT_AVX512, FT_FP32, tile_fp8_block_fp32_avx512, fp8_block_order, 0, 0, few_fp8_block_fp32_avx512,
     many_fp8_block_fp32_avx512, NULL, FT_FEW + 1},
    {FT_AVX512BF16, FT_BF16, tile_fp8_block_bf16_avx512bf16, fp8_block_order, 0, 0, few_fp8_block_bf16_avx512bf16,
     many_fp8_block_bf16_avx512bf16, NULL, FT_FEW + 1},
    {FT_AMX, FT_BF16, tile_fp8_block_bf16_amx, fp8_block_order, 0, 0, few_fp8_block_bf16_amx, many_fp8_block_bf16_amx,
     NULL, FT_FEW + 1},
#endif
    {FT_LEVELS, 0, NULL, NULL, 0, 0, NULL, NULL, NULL, 0},
};
#endif
