/* fp16 to fp32 without F16C. */
#ifndef FREETOKEN_FP16_H
#define FREETOKEN_FP16_H
#include "isa.h"

static inline float ft_fp16(const uint8_t *p) { /* exact for every finite value */
    uint32_t half = p[0] | (uint32_t)p[1] << 8;
    uint32_t sign = (half & 0x8000) << 16, exponent = (half >> 10) & 31, mantissa = half & 0x3ff;
    if (exponent) return ft_bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
    float value = (float)mantissa * 0x1p-24f;
    return sign ? -value : value;
}

#endif
