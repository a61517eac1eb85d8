/* e4m3 to fp32. A code moved into fp16 (sign to bit 15, the rest up by 7) is its value times 2^-8, subnormals
 * included, so that the vector versions give values times 2^-8 and their callers multiply by 2^8 when it is cheap.
 */
#ifndef FREETOKEN_E4M3_H
#define FREETOKEN_E4M3_H
#include "isa.h"

static inline float ft_e4m3(uint8_t code) { /* exact for every code but NaN, which loading refuses */
    uint32_t sign = (uint32_t)(code & 0x80) << 24, exponent = (code >> 3) & 15, mantissa = code & 7;
    if (exponent) return ft_bits_to_float(sign | (exponent + 120) << 23 | mantissa << 20);
    float value = (float)mantissa * 0x1p-9f;
    return sign ? -value : value;
}

#ifdef FT_X86
/* 8 or 16 values times 2^-8: sign extension puts the sign into bit 15 and, after the shift, also into bit 14. */
FT_TARGET_AVX2 static inline __m256 ft_e4m3_avx2(const uint8_t *p) {
    __m128i code = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const void *)p)), 7);
    return _mm256_cvtph_ps(_mm_and_si128(code, _mm_set1_epi16((short)0xbfff)));
}

FT_TARGET_AVX512 static inline __m512 ft_e4m3_avx512(const uint8_t *p) {
    __m256i code = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)p)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(code, _mm256_set1_epi16((short)0xbfff)));
}
#endif
#endif
