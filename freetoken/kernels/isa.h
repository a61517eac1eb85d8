/* Instruction set levels, activation kinds and the type of a tile function.
 *
 * A tile function multiplies one tile (16 rows of k weights, laid out as formats/base.py says; k is a width that
 * the format holds) with one prepared activation vector and writes 16 sums in fp32, without the matrix's
 * global scale. It reads exactly the tile and the vector, and cannot fail.
 */
#ifndef FREETOKEN_ISA_H
#define FREETOKEN_ISA_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(FT_SCALAR_ONLY) /* FT_SCALAR_ONLY: as on other processors */
#define FT_X86 1
#include <immintrin.h>
#define FT_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define FT_TARGET_AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")))
#define FT_TARGET_VNNI __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#define FT_TARGET_BF16 \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16")))
#ifdef FT_AMX_TWIN /* tests/support/amx_twin.h in place of the matrix unit */
#define FT_TARGET_AMX FT_TARGET_BF16
#else
#define FT_TARGET_AMX                                                                                                \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,amx-tile,"         \
                          "amx-int8,amx-bf16")))
#endif
#endif

#if defined(FT_X86) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Levels are ordered: a CPU that has one has those before it. */
enum { FT_SCALAR, FT_AVX2, FT_AVX512, FT_AVX512VNNI, FT_AVX512BF16, FT_AMX, FT_LEVELS };

/* How an activation vector of k values is prepared for a tile function:
 *   FP32  float[k], each line's values in the function's `order` (a bf16 activation without a bf16 dot is this, rounded
 *         beforehand)
 *   BF16  uint16[k], the same, so that pairs meet in one 32-bit lane
 *   INT8  int8[k], the same, then float[blocks] scales times the function's `unit`, then int32[blocks] corrections: the
 *         block's sum times -`offset`
 *   INT15 int8[k] high digits and int8[k] low digits, values 128 * high + low, then scales and corrections as INT8
 */
enum { FT_FP32, FT_BF16, FT_INT8, FT_INT15 };

typedef void (*ft_tile)(const uint8_t *w, ptrdiff_t k, const void *x, float *y);

/* The same with FT_FEW vectors, y being FT_FEW x 16: the tile is decoded once, or where two or three of them differ and
 * that is faster, for each. Not a bit differs from ft_tile. */
enum { FT_FEW = 4 };
typedef void (*ft_tile_few)(const uint8_t *w, ptrdiff_t k, const void *const *x, float *y);

/* The same with n vectors, more than FT_FEW and at most FT_MANY, each `stride` bytes behind the one before; y is n x 16.
 * Not a bit differs from ft_tile. INT15 vectors are others here: for each block bf16[] of 128 * high, then bf16[] of low;
 * then float[blocks] scales without the `unit`. Each line's values are in the function's `many_order`. */
enum { FT_MANY = 64 };
typedef void (*ft_tile_many)(const uint8_t *w, ptrdiff_t k, const void *x, ptrdiff_t stride, int n, float *y);

typedef struct {
    int level;            /* the lowest level that runs it; FT_LEVELS ends a table */
    int act;
    ft_tile tile;
    const uint8_t *order; /* position of each of a line's activations; NULL is natural */
    /* Of INT8 and INT15: weights are decoded to whole numbers, of which `offset` is zero and a step is `unit`. */
    int offset;
    float unit;
    ft_tile_few few;      /* NULL: there is none */
    ft_tile_many many;    /* the same */
    const uint8_t *many_order; /* of INT15, as `order` */
    int many_from;        /* with fewer vectors than this the others are faster; more than FT_FEW */
} ft_kernel;

/* A body, tiles_NAME(w, k, x, y, n), for n vectors, 1 or FT_FEW, makes both functions. */
#define FT_BODY static inline __attribute__((always_inline)) void
#define FT_TILE_AND_FEW(target, name)                                                                                \
    target static void tile_##name(const uint8_t *w, ptrdiff_t k, const void *x, float *y) {                         \
        tiles_##name(w, k, &x, y, 1);                                                                                \
    }                                                                                                                \
    target static void few_##name(const uint8_t *w, ptrdiff_t k, const void *const *x, float *y) {                   \
        tiles_##name(w, k, x, y, FT_FEW);                                                                            \
    }

/* The same where FT_FEW vectors together are faster than one after the other, but two or three are not: the last of those is
 * there several times. */
#define FT_TILE_AND_FOUR(target, name)                                                                               \
    target static void tile_##name(const uint8_t *w, ptrdiff_t k, const void *x, float *y) {                         \
        tiles_##name(w, k, &x, y, 1);                                                                                \
    }                                                                                                                \
    target static void few_##name(const uint8_t *w, ptrdiff_t k, const void *const *x, float *y) {                   \
        if (x[FT_FEW - 2] != x[FT_FEW - 1]) {                                                                        \
            tiles_##name(w, k, x, y, FT_FEW);                                                                        \
            return;                                                                                                  \
        }                                                                                                            \
        for (int t = 0; t < FT_FEW; t++)                                                                             \
            if (t && x[t] == x[t - 1])                                                                               \
                memcpy(y + 16 * t, y + 16 * (t - 1), 16 * sizeof *y);                                                \
            else                                                                                                     \
                tiles_##name(w, k, x + t, y + 16 * t, 1);                                                            \
    }

/* Whether this process may use the matrix unit: Linux 5.16 and newer ask to be asked, once for all threads. */
static inline int ft_may_use_amx(void) {
#if defined(FT_AMX_TWIN)
    return 1;
#elif defined(FT_X86) && defined(__linux__)
    enum { TILE = 1 << 24, INT8 = 1 << 25, BF16 = 1 << 22, ASK = 0x1023 /* ARCH_REQ_XCOMP_PERM */, TILE_DATA = 18 };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    return !(~d & (TILE | INT8 | BF16)) && syscall(SYS_arch_prctl, (long)ASK, (long)TILE_DATA) == 0;
#else
    return 0;
#endif
}

static inline int ft_best_level(void) {
#ifdef FT_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
        return FT_SCALAR;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return FT_AVX2;
    if (!__builtin_cpu_supports("avx512vnni")) return FT_AVX512;
    if (!__builtin_cpu_supports("avx512bf16")) return FT_AVX512VNNI;
    return ft_may_use_amx() ? FT_AMX : FT_AVX512BF16;
#else
    return FT_SCALAR;
#endif
}

/* Tiles are read once, in order. Lines are asked for `ft_near` bytes ahead into the first level cache and `ft_far` bytes
 * ahead into the second. Bare loops over 2 GiB, share of the fastest plain read, 4 bits / bf16:
 *
 *                   4 KiB both   near 4, far 8 KiB    near 1, far 8 KiB    near 2, far 8 KiB
 *   2 Zen 5 cores   0.96 / 0.98  0.92 to 0.94 / 0.97  0.89 to 0.91 / 0.97
 *   16 Xeon cores   0.87 / 0.90                       0.88 / 0.96          0.88 / 0.99
 *
 * On the Xeons the first level alone, 4 KiB ahead, gave 0.82 / 0.87: it waits for too few lines at once to cover the
 * way to memory. Tried as well: 1, 2 and 8 KiB for both, 4 to 32 KiB for the second level. A prefetch past the end of a
 * bank is harmless: it cannot fault. */
#ifdef FT_X86
static ptrdiff_t ft_near = 4096, ft_far = 4096;

__attribute__((constructor)) static void ft_find_distances(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_is("intel")) ft_near = 2048, ft_far = 8192;
}

#define FT_PREFETCH(p)                                                                                               \
    do {                                                                                                             \
        _mm_prefetch((const char *)(p) + ft_far, _MM_HINT_T1);                                                       \
        _mm_prefetch((const char *)(p) + ft_near, _MM_HINT_T0);                                                      \
    } while (0)
#endif

static inline float ft_bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t ft_load32(const uint8_t *p) {
    uint32_t value;
    memcpy(&value, p, 4);
    return value;
}

/* An INT8 activation vector's parts; those of an INT15 vector are those of an INT8 vector of its 2 k digits. */
static inline const float *ft_int8_scales(const void *x, ptrdiff_t k) { return (const float *)((const int8_t *)x + k); }
static inline const int32_t *ft_int8_corrections(const void *x, ptrdiff_t k, ptrdiff_t blocks) {
    return (const int32_t *)(ft_int8_scales(x, k) + blocks);
}

#endif
