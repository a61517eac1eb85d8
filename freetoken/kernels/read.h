/* Reads memory and does next to nothing with it: the roof that expert layers are measured against.
 *
 * plain      one run, 256 bytes at a time
 * prefetch   the same, lines asked for ahead as tiles do
 * streams    four runs side by side
 *
 * Which is fastest differs between machines and moments; the roof is the best of them in the same minute.
 */
#ifndef FREETOKEN_READ_H
#define FREETOKEN_READ_H
#include "isa.h"

enum { FT_READ_PLAIN, FT_READ_PREFETCH, FT_READ_STREAMS, FT_READ_STEP = 256 };

/* The sum of n bytes taken as 64-bit numbers; n is a multiple of 4 * FT_READ_STEP. */
typedef uint64_t (*ft_read)(const uint8_t *p, ptrdiff_t n, int way);

static uint64_t ft_read_scalar(const uint8_t *p, ptrdiff_t n, int way) {
    uint64_t sum[4] = {0};
    (void)way;
    for (ptrdiff_t i = 0; i < n; i += 32) {
        uint64_t v[4];
        memcpy(v, p + i, 32);
        for (int j = 0; j < 4; j++) sum[j] += v[j];
    }
    return sum[0] + sum[1] + sum[2] + sum[3];
}

#ifdef FT_X86
/* One step of a run. Prefetching is decided by the compiler: `way` is a constant at every call. */
#define FT_READ_LINES(p, way, sums, type, load, add)                                                                  \
    do {                                                                                                              \
        for (int i = 0; i < FT_READ_STEP; i += 64)                                                                    \
            if ((way) == FT_READ_PREFETCH) FT_PREFETCH((p) + i);                                                      \
        for (int i = 0; i < FT_READ_STEP / (int)sizeof(type); i++)                                                    \
            (sums)[i & 3] = add((sums)[i & 3], load((const void *)((p) + sizeof(type) * i)));                         \
    } while (0)

#define FT_READ_RUNS(n, runs, step)                                                                                   \
    for (ptrdiff_t at = 0, share = (n) / (runs); at < share; at += FT_READ_STEP)                                      \
        for (int run = 0; run < (runs); run++) step

FT_TARGET_AVX512 static uint64_t ft_read_avx512(const uint8_t *p, ptrdiff_t n, int way) {
    __m512i s[4];
    uint64_t sums[8], total = 0;
    for (int i = 0; i < 4; i++) s[i] = _mm512_setzero_si512();
    if (way == FT_READ_PREFETCH)
        FT_READ_RUNS(n, 1, FT_READ_LINES(p + at, FT_READ_PREFETCH, s, __m512i, _mm512_loadu_si512, _mm512_add_epi64));
    else if (way == FT_READ_STREAMS)
        FT_READ_RUNS(n, 4, FT_READ_LINES(p + run * share + at, FT_READ_PLAIN, s, __m512i, _mm512_loadu_si512,
                                         _mm512_add_epi64));
    else
        FT_READ_RUNS(n, 1, FT_READ_LINES(p + at, FT_READ_PLAIN, s, __m512i, _mm512_loadu_si512, _mm512_add_epi64));
    _mm512_storeu_si512(sums, _mm512_add_epi64(_mm512_add_epi64(s[0], s[1]), _mm512_add_epi64(s[2], s[3])));
    for (int i = 0; i < 8; i++) total += sums[i];
    return total;
}

FT_TARGET_AVX2 static uint64_t ft_read_avx2(const uint8_t *p, ptrdiff_t n, int way) {
    __m256i s[4];
    uint64_t sums[4];
    for (int i = 0; i < 4; i++) s[i] = _mm256_setzero_si256();
    if (way == FT_READ_PREFETCH)
        FT_READ_RUNS(n, 1, FT_READ_LINES(p + at, FT_READ_PREFETCH, s, __m256i, _mm256_loadu_si256, _mm256_add_epi64));
    else if (way == FT_READ_STREAMS)
        FT_READ_RUNS(n, 4, FT_READ_LINES(p + run * share + at, FT_READ_PLAIN, s, __m256i, _mm256_loadu_si256,
                                         _mm256_add_epi64));
    else
        FT_READ_RUNS(n, 1, FT_READ_LINES(p + at, FT_READ_PLAIN, s, __m256i, _mm256_loadu_si256, _mm256_add_epi64));
    _mm256_storeu_si256((void *)sums,
                        _mm256_add_epi64(_mm256_add_epi64(s[0], s[1]), _mm256_add_epi64(s[2], s[3])));
    return sums[0] + sums[1] + sums[2] + sums[3];
}
#endif

static inline ft_read ft_read_best(void) {
#ifdef FT_X86
    if (ft_best_level() >= FT_AVX512) return ft_read_avx512;
    if (ft_best_level() >= FT_AVX2) return ft_read_avx2;
#endif
    return ft_read_scalar;
}
#endif
