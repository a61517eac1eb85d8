/* q8_0 tiles: a block is 32 weights: 16 fp16 scales (32 bytes), 8 lines of int8 codes (544 bytes).
 *
 * A line is 4 weights of 16 rows. Two signed sides need a trick each: AVX2 moves the weight's sign to the activation
 * (|w| * sign(x, w); 128 * 127 * 2 still fits 16 bits), VNNI adds 128 to the weights and corrects by the sum of x.
 * Exact weights with bf16 activations need no version of their own: widening to fp32 costs as much as to bf16.
 */
#ifndef FREETOKEN_TILE_Q8_0_H
#define FREETOKEN_TILE_Q8_0_H
#include "amx.h"
#include "fp16.h"

enum { Q8_0_BLOCK = 32, Q8_0_BYTES = 544 };

static void tile_q8_0_fp32_scalar(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const float *x = xv;
    float sum[16] = {0};
    for (ptrdiff_t b = 0; b < k / Q8_0_BLOCK; b++, w += Q8_0_BYTES, x += Q8_0_BLOCK)
        for (int row = 0; row < 16; row++) {
            float part = 0;
            for (int i = 0; i < Q8_0_BLOCK; i++) part += (float)(int8_t)w[32 + 64 * (i / 4) + 4 * row + i % 4] * x[i];
            sum[row] += part * ft_fp16(w + 2 * row);
        }
    memcpy(y, sum, sizeof sum);
}

static void tile_q8_0_int8_scalar(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const int8_t *x = xv;
    const float *scale = ft_int8_scales(xv, k);
    float sum[16] = {0};
    for (ptrdiff_t b = 0; b < k / Q8_0_BLOCK; b++, w += Q8_0_BYTES, x += Q8_0_BLOCK)
        for (int row = 0; row < 16; row++) {
            int32_t part = 0;
            for (int i = 0; i < Q8_0_BLOCK; i++) part += (int8_t)w[32 + 64 * (i / 4) + 4 * row + i % 4] * x[i];
            sum[row] += (float)part * scale[b] * ft_fp16(w + 2 * row);
        }
    memcpy(y, sum, sizeof sum);
}

static void tile_q8_0_int15_scalar(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const int8_t *x = xv;
    const float *scale = ft_int8_scales(xv, 2 * k);
    float sum[16] = {0};
    for (ptrdiff_t b = 0; b < k / Q8_0_BLOCK; b++, w += Q8_0_BYTES, x += Q8_0_BLOCK)
        for (int row = 0; row < 16; row++) {
            int32_t part = 0;
            for (int i = 0; i < Q8_0_BLOCK; i++)
                part += (int8_t)w[32 + 64 * (i / 4) + 4 * row + i % 4] * (128 * x[i] + x[k + i]);
            sum[row] += (float)part * scale[b] * ft_fp16(w + 2 * row);
        }
    memcpy(y, sum, sizeof sum);
}

#ifdef FT_X86
FT_TARGET_AVX2 static void tile_q8_0_fp32_avx2(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const float *x = xv;
    __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (ptrdiff_t b = 0; b < k / Q8_0_BLOCK; b++, w += Q8_0_BYTES, x += Q8_0_BLOCK) {
        for (int p = 0; p < 544; p += 64) FT_PREFETCH(w + p);
        for (int h = 0; h < 2; h++) {
            __m256 s0 = _mm256_setzero_ps(), s1 = s0;
            for (int line = 0; line < 8; line++) {
                __m256i v = _mm256_loadu_si256((const void *)(w + 32 + 64 * line + 32 * h));
                const float *xl = x + 4 * line;
                __m256i w0 = _mm256_srai_epi32(_mm256_slli_epi32(v, 24), 24);
                __m256i w1 = _mm256_srai_epi32(_mm256_slli_epi32(v, 16), 24);
                __m256i w2 = _mm256_srai_epi32(_mm256_slli_epi32(v, 8), 24);
                __m256i w3 = _mm256_srai_epi32(v, 24);
                s0 = _mm256_fmadd_ps(_mm256_cvtepi32_ps(w0), _mm256_broadcast_ss(xl), s0);
                s1 = _mm256_fmadd_ps(_mm256_cvtepi32_ps(w1), _mm256_broadcast_ss(xl + 1), s1);
                s0 = _mm256_fmadd_ps(_mm256_cvtepi32_ps(w2), _mm256_broadcast_ss(xl + 2), s0);
                s1 = _mm256_fmadd_ps(_mm256_cvtepi32_ps(w3), _mm256_broadcast_ss(xl + 3), s1);
            }
            __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const void *)(w + 16 * h)));
            sum[h] = _mm256_fmadd_ps(_mm256_add_ps(s0, s1), scale, sum[h]);
        }
    }
    _mm256_storeu_ps(y, sum[0]);
    _mm256_storeu_ps(y + 8, sum[1]);
}

FT_TARGET_AVX2 static void tile_q8_0_int8_avx2(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const int8_t *x = xv;
    const float *xscale = ft_int8_scales(xv, k);
    const __m256i one = _mm256_set1_epi16(1);
    __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (ptrdiff_t b = 0; b < k / Q8_0_BLOCK; b++, w += Q8_0_BYTES, x += Q8_0_BLOCK) {
        for (int p = 0; p < 544; p += 64) FT_PREFETCH(w + p);
        for (int h = 0; h < 2; h++) {
            __m256i total = _mm256_setzero_si256();
            for (int line = 0; line < 8; line++) {
                __m256i v = _mm256_loadu_si256((const void *)(w + 32 + 64 * line + 32 * h));
                __m256i xl = _mm256_set1_epi32((int)ft_load32((const uint8_t *)x + 4 * line));
                __m256i pair = _mm256_maddubs_epi16(_mm256_abs_epi8(v), _mm256_sign_epi8(xl, v));
                total = _mm256_add_epi32(total, _mm256_madd_epi16(pair, one));
            }
            __m256 part = _mm256_mul_ps(_mm256_cvtepi32_ps(total), _mm256_set1_ps(xscale[b]));
            sum[h] = _mm256_fmadd_ps(part, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(w + 16 * h))), sum[h]);
        }
    }
    _mm256_storeu_ps(y, sum[0]);
    _mm256_storeu_ps(y + 8, sum[1]);
}

FT_TARGET_AVX2 static void tile_q8_0_int15_avx2(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const uint8_t *x = xv;
    const float *xscale = ft_int8_scales(xv, 2 * k);
    const __m256i one = _mm256_set1_epi16(1), high = _mm256_set1_epi16(128);
    __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (ptrdiff_t b = 0; b < k / Q8_0_BLOCK; b++, w += Q8_0_BYTES, x += Q8_0_BLOCK) {
        for (int p = 0; p < 544; p += 64) FT_PREFETCH(w + p);
        for (int h = 0; h < 2; h++) {
            __m256i total = _mm256_setzero_si256();
            for (int line = 0; line < 8; line++) {
                __m256i v = _mm256_loadu_si256((const void *)(w + 32 + 64 * line + 32 * h)), size = _mm256_abs_epi8(v);
                __m256i xh = _mm256_sign_epi8(_mm256_set1_epi32((int)ft_load32(x + 4 * line)), v);
                __m256i xl = _mm256_sign_epi8(_mm256_set1_epi32((int)ft_load32(x + k + 4 * line)), v);
                total = _mm256_add_epi32(total, _mm256_madd_epi16(_mm256_maddubs_epi16(size, xh), high));
                total = _mm256_add_epi32(total, _mm256_madd_epi16(_mm256_maddubs_epi16(size, xl), one));
            }
            __m256 part = _mm256_mul_ps(_mm256_cvtepi32_ps(total), _mm256_set1_ps(xscale[b]));
            sum[h] = _mm256_fmadd_ps(part, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(w + 16 * h))), sum[h]);
        }
    }
    _mm256_storeu_ps(y, sum[0]);
    _mm256_storeu_ps(y + 8, sum[1]);
}

FT_TARGET_AVX512 static void tile_q8_0_fp32_avx512(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const float *x = xv;
    __m512 sum = _mm512_setzero_ps();
    for (ptrdiff_t b = 0; b < k / Q8_0_BLOCK; b++, w += Q8_0_BYTES, x += Q8_0_BLOCK) {
        for (int p = 0; p < 544; p += 64) FT_PREFETCH(w + p);
        __m512 s[4];
        for (int i = 0; i < 4; i++) s[i] = _mm512_setzero_ps();
        for (int line = 0; line < 8; line++) {
            __m512i v = _mm512_loadu_si512(w + 32 + 64 * line);
            const float *xl = x + 4 * line;
            __m512i w0 = _mm512_srai_epi32(_mm512_slli_epi32(v, 24), 24);
            __m512i w1 = _mm512_srai_epi32(_mm512_slli_epi32(v, 16), 24);
            __m512i w2 = _mm512_srai_epi32(_mm512_slli_epi32(v, 8), 24);
            __m512i w3 = _mm512_srai_epi32(v, 24);
            s[0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(w0), _mm512_set1_ps(xl[0]), s[0]);
            s[1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(w1), _mm512_set1_ps(xl[1]), s[1]);
            s[2] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(w2), _mm512_set1_ps(xl[2]), s[2]);
            s[3] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(w3), _mm512_set1_ps(xl[3]), s[3]);
        }
        __m512 part = _mm512_add_ps(_mm512_add_ps(s[0], s[1]), _mm512_add_ps(s[2], s[3]));
        sum = _mm512_fmadd_ps(part, _mm512_cvtph_ps(_mm256_loadu_si256((const void *)w)), sum);
    }
    _mm512_storeu_ps(y, sum);
}

FT_TARGET_VNNI static void tile_q8_0_int8_vnni(const uint8_t *w, ptrdiff_t k, const void *xv, float *y) {
    const int8_t *x = xv;
    const float *xscale = ft_int8_scales(xv, k);
    const int32_t *correction = ft_int8_corrections(xv, k, k / Q8_0_BLOCK);
    const __m512i flip = _mm512_set1_epi8((char)0x80);
    __m512 sum = _mm512_setzero_ps();
    for (ptrdiff_t b = 0; b < k / Q8_0_BLOCK; b++, w += Q8_0_BYTES, x += Q8_0_BLOCK) {
        for (int p = 0; p < 544; p += 64) FT_PREFETCH(w + p);
        __m512i s0 = _mm512_set1_epi32(correction[b]), s1 = _mm512_setzero_si512();
        for (int line = 0; line < 8; line += 2) {
            __m512i v = _mm512_xor_si512(_mm512_loadu_si512(w + 32 + 64 * line), flip);
            __m512i u = _mm512_xor_si512(_mm512_loadu_si512(w + 96 + 64 * line), flip);
            s0 = _mm512_dpbusd_epi32(s0, v, _mm512_set1_epi32((int)ft_load32((const uint8_t *)x + 4 * line)));
            s1 = _mm512_dpbusd_epi32(s1, u, _mm512_set1_epi32((int)ft_load32((const uint8_t *)x + 4 * line + 4)));
        }
        __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(s0, s1)), _mm512_set1_ps(xscale[b]));
        sum = _mm512_fmadd_ps(part, _mm512_cvtph_ps(_mm256_loadu_si256((const void *)w)), sum);
    }
    _mm512_storeu_ps(y, sum);
}

FT_TARGET_VNNI FT_BODY tiles_q8_0_int15_vnni(const uint8_t *w, ptrdiff_t k, const void *const *x, float *y,
                                            int n) {
    const ptrdiff_t blocks = k / Q8_0_BLOCK;
    const __m512i flip = _mm512_set1_epi8((char)0x80);
    __m512 sum[FT_FEW];
    for (int t = 0; t < n; t++) sum[t] = _mm512_setzero_ps();
    for (ptrdiff_t b = 0; b < blocks; b++, w += Q8_0_BYTES) {
        for (int p = 0; p < 544; p += 64) FT_PREFETCH(w + p);
        __m512i high[FT_FEW], low[FT_FEW];
        ft_begin_int15(x, k, blocks, b, n, high, low);
        for (int line = 0; line < 8; line++) {
            __m512i v = _mm512_xor_si512(_mm512_loadu_si512(w + 32 + 64 * line), flip);
            for (int t = 0; t < n; t++) {
                const uint8_t *xl = (const uint8_t *)x[t] + b * Q8_0_BLOCK + 4 * line;
                high[t] = _mm512_dpbusd_epi32(high[t], v, _mm512_set1_epi32((int)ft_load32(xl)));
                low[t] = _mm512_dpbusd_epi32(low[t], v, _mm512_set1_epi32((int)ft_load32(xl + k)));
            }
        }
        const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const void *)w));
        for (int t = 0; t < n; t++) {
            const __m512 part = ft_end_int15(x[t], k, b, high[t], low[t]);
            sum[t] = _mm512_fmadd_ps(part, scale, sum[t]);
        }
    }
    for (int t = 0; t < n; t++) _mm512_storeu_ps(y + 16 * t, sum[t]);
}
FT_TILE_AND_FEW(FT_TARGET_VNNI, q8_0_int15_vnni)

FT_TARGET_AMX static inline uint16_t q8_0_lines_amx(const uint8_t *w, uint8_t *lines, float *scales) {
    for (int p = 0; p < 544; p += 64) FT_PREFETCH(w + p);
    const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
    for (int line = 0; line < 8; line++) {
        const __m512i v = _mm512_loadu_si512(w + 32 + 64 * line);
        for (int i = 0; i < 2; i++) { /* weights 2 i and 2 i + 1 of a row become fp32, whose upper halves are bf16 */
            const __m512i low_code = _mm512_slli_epi32(v, 24 - 16 * i), high_code = _mm512_slli_epi32(v, 16 - 16 * i);
            const __m512i a = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32(low_code, 24)));
            const __m512i b = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32(high_code, 24)));
            const __m512i pairs = _mm512_or_si512(_mm512_srli_epi32(a, 16), _mm512_and_si512(b, high));
            _mm512_store_si512(lines + 128 * line + 64 * i, pairs);
        }
    }
    _mm512_store_ps(scales, _mm512_cvtph_ps(_mm256_loadu_si256((const void *)w)));
    return 0;
}

FT_TARGET_AMX static void many_q8_0_int15_amx(const uint8_t *w, ptrdiff_t k, const void *x, ptrdiff_t stride, int n,
                                              float *y) {
    ft_amx_int15(w, k, Q8_0_BLOCK, Q8_0_BYTES, q8_0_lines_amx, 1.f, x, stride, n, y);
}
#endif

static const ft_kernel ft_kernels_q8_0[] = {
    {FT_SCALAR, FT_FP32, tile_q8_0_fp32_scalar, NULL, 0, 0, NULL, NULL, NULL, 0},
    {FT_SCALAR, FT_INT8, tile_q8_0_int8_scalar, NULL, 128, 1.f, NULL, NULL, NULL, 0},
    {FT_SCALAR, FT_INT15, tile_q8_0_int15_scalar, NULL, 128, 1.f, NULL, NULL, NULL, 0},
#ifdef FT_X86
    {FT_AVX2, FT_FP32, tile_q8_0_fp32_avx2, NULL, 0, 0, NULL, NULL, NULL, 0},
    {FT_AVX2, FT_INT8, tile_q8_0_int8_avx2, NULL, 128, 1.f, NULL, NULL, NULL, 0},
    {FT_AVX2, FT_INT15, tile_q8_0_int15_avx2, NULL, 128, 1.f, NULL, NULL, NULL, 0},
    {FT_AVX512, FT_FP32, tile_q8_0_fp32_avx512, NULL, 0, 0, NULL, NULL, NULL, 0},
    {FT_AVX512VNNI, FT_INT8, tile_q8_0_int8_vnni, NULL, 128, 1.f, NULL, NULL, NULL, 0},
    {FT_AVX512VNNI, FT_INT15, tile_q8_0_int15_vnni, NULL, 128, 1.f, few_q8_0_int15_vnni, NULL, NULL, 0},
    {FT_AMX, FT_INT15, tile_q8_0_int15_vnni, NULL, 128, 1.f, few_q8_0_int15_vnni,
     many_q8_0_int15_amx, NULL, FT_INT15_MANY_FROM},
#endif
    {FT_LEVELS, 0, NULL, NULL, 0, 0, NULL, NULL, NULL, 0},
};
#endif
