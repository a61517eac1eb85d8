/* What happens to 16 sums, or to activations, before and between the products: small loops that the compiler turns into
 * vectors of its baseline, the same on every tier. With a scalar expf and lrintf, layers of small 4-bit experts, which lie
 * in the cache, gave 16 to 18 GB/s on two Zen 5 cores; so they give 22 to 24.
 */
#ifndef FREETOKEN_VALUES_H
#define FREETOKEN_VALUES_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { FT_TILE_ROWS = 16 };

/* Added to a value below 2^22, this leaves its nearest whole number (ties to even) in the lowest bits. */
#define FT_TO_WHOLE 12582912.f

static inline int32_t ft_bits_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float ft_float_of(int32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* e^x within 2 ulp for x from -87 to 88, beyond as at these ends; a NaN stays one. 2^n times a Taylor polynomial of the
 * rest, which is at most ln(2) / 2; ln(2) is in two parts, the first of which times n is exact. */
static inline float ft_exp(float x) {
    x = x > 88.f ? 88.f : x;
    x = x < -87.f ? -87.f : x;
    const float whole = x * 1.44269504f + FT_TO_WHOLE, n = whole - FT_TO_WHOLE;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.f / 5040;
    p = p * r + 1.f / 720;
    p = p * r + 1.f / 120;
    p = p * r + 1.f / 24;
    p = p * r + 1.f / 6;
    p = p * r + .5f;
    p = p * r + 1.f;
    p = p * r + 1.f;
    return p * ft_float_of((int32_t)(((uint32_t)ft_bits_of(whole) + 127u) << 23));
}

/* g * sigmoid(alpha * g) of 16 values. */
static inline void ft_swish(const float *g, float alpha, float *out) {
    for (int i = 0; i < FT_TILE_ROWS; i++) out[i] = g[i] / (1.f + ft_exp(-alpha * g[i]));
}

/* A block of activations as whole numbers from -steps to steps and their scale, amax / steps; an all-zero block has scale
 * 0. Magnitudes are compared as integers, where a NaN is the largest: it becomes the scale and reaches the output.
 *
 * n <= 128 of them, a multiple of `line`; value k of a line goes to place order[k] (NULL: k). low: where the low digits of
 * numbers 128 * high + low go, NULL for numbers of one digit. offset, unit: the tile function's, isa.h.
 */
static inline void ft_whole_block(const float *x, ptrdiff_t n, int steps, int offset, float unit, const uint8_t *order,
                                  ptrdiff_t line, int8_t *out, int8_t *low, float *scale, int32_t *correction) {
    int32_t code[128], high[128], top_bits = 0;
    uint32_t total = 0;
    for (ptrdiff_t k = 0; k < n; k++) {
        const int32_t bits = ft_bits_of(x[k]) & 0x7fffffff;
        top_bits = bits > top_bits ? bits : top_bits;
    }
    const float top = ft_float_of(top_bits);
    const float inverse = top <= 1e-30f ? 0.f : (float)steps / top;
    for (ptrdiff_t k = 0; k < n; k++) {
        code[k] = (int32_t)((uint32_t)ft_bits_of(x[k] * inverse + FT_TO_WHOLE) - 0x4b400000u);
        total += (uint32_t)code[k];
    }
    if (low)
        for (ptrdiff_t k = 0; k < n; k++) {
            high[k] = (int32_t)((uint32_t)code[k] + 64u) >> 7;
            code[k] = (int32_t)((uint32_t)code[k] - 128u * (uint32_t)high[k]);
        }
    for (ptrdiff_t k = 0; k < n; k += line)
        for (ptrdiff_t i = 0; i < line; i++) {
            const ptrdiff_t at = k + (order ? order[i] : i);
            out[at] = (int8_t)(low ? high[k + i] : code[k + i]);
            if (low) low[at] = (int8_t)code[k + i];
        }
    *scale = unit * (top <= 1e-30f ? 0.f : top / (float)steps);
    *correction = (int32_t)(0u - total * (uint32_t)offset);
}

/* n <= 128 activations of a block as bf16 of 128 * high and, n behind, of low, and their scale: INT15 for many vectors. */
static inline void ft_wide_block(const float *x, ptrdiff_t n, int steps, const uint8_t *order, ptrdiff_t line,
                                 uint16_t *out, float *scale) {
    int8_t high[128], low[128];
    int32_t correction;
    ft_whole_block(x, n, steps, 0, 1.f, order, line, high, low, scale, &correction);
    for (ptrdiff_t k = 0; k < n; k++) {
        out[k] = (uint16_t)((uint32_t)ft_bits_of((float)(128 * high[k])) >> 16);
        out[n + k] = (uint16_t)((uint32_t)ft_bits_of((float)low[k]) >> 16);
    }
}

static inline float ft_bf16_to_float(uint16_t bits) { return ft_float_of((int32_t)((uint32_t)bits << 16)); }

/* Rounded to nearest even; a NaN stays NaN. */
static inline uint16_t ft_float_to_bf16(float value) {
    const uint32_t bits = (uint32_t)ft_bits_of(value);
    return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

enum { FT_FP8_GROUP = 128 /* activations under one scale, as DeepSeek rounds them */ };

/* n <= 128 values to the nearest e4m3 times the least power of two that needs no clamping; out may be x.
 *
 * DeepSeek's act_quant with scale_fmt ue8m0, its floor of 1e-4 under the largest magnitude included: the scale is 2^-22 or
 * more, so no result is subnormal. A NaN or an infinity (magnitudes are compared as integers, where these are the largest)
 * makes the whole group NaN. */
static inline void ft_round_fp8_group(const float *x, ptrdiff_t n, float *out) {
    int32_t top = 0x38d1b717; /* 1e-4 */
    for (ptrdiff_t k = 0; k < n; k++) {
        const int32_t bits = ft_bits_of(x[k]) & 0x7fffffff;
        top = bits > top ? bits : top;
    }
    /* 448 is 1.75 * 2^8: a larger fraction needs the next power of two */
    const int32_t power = (int32_t)(((uint32_t)top + 0x1fffff) >> 23) - 8;
    const float scale = ft_float_of(top >= 0x7f800000 ? 0x7fc00000 : power << 23);
    const float inverse = ft_float_of((254 - power) << 23);
    for (ptrdiff_t k = 0; k < n; k++) {
        const float value = x[k] * inverse;
        /* A step is an eighth of the power of two below the value, 2^-9 at least. Added to 1.5 * 2^23 steps, the value is
         * rounded to one. */
        int32_t bits = ft_bits_of(value) & 0x7f800000;
        bits = bits > 121 << 23 ? bits : 121 << 23;
        const float shift = ft_float_of((int32_t)((uint32_t)bits + (20u << 23)) | 0x400000);
        out[k] = ((value + shift) - shift) * scale;
    }
}

static inline void ft_round_fp8(const float *x, ptrdiff_t n, float *out) {
    for (ptrdiff_t k = 0; k < n; k += FT_FP8_GROUP)
        ft_round_fp8_group(x + k, FT_FP8_GROUP < n - k ? FT_FP8_GROUP : n - k, out + k);
}
#endif
