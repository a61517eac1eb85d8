/* Many vectors at once, by the matrix unit (AMX), for tile functions that give the bits of those for one vector.
 *
 * A tile of that unit has up to 16 rows of 64 bytes. TDPBF16PS adds to a tile of 16 x 16 sums in fp32 the products of
 * two tiles of bf16: a row of the first is 32 of a vector's activations, as they lie in memory; a row of the second is a
 * pair of weights of each of 16 outputs, a line as formats/base.py lays it out. It adds up the first of all pairs and the
 * second of all pairs, each from zero and in their order, then both sums, then that to what was there, all rounded to
 * nearest and with subnormals as zero (Intel's Software Developer's Manual; compared bit by bit on a Sapphire Rapids).
 *
 * INT15    Sums of whole numbers are exact here, too, so they have no order: those of a block's high digits and those of
 *          its low ones have less than 24 bits, and only where the two meet may there be a rounding, the one that VNNI's
 *          functions do when they convert to fp32. Digits are bf16 for this (see ft_tile_many in isa.h). Products of int8
 *          would take them as they are, but give two tiles of sums a block; to fetch one from the unit costs as much as a
 *          product.
 * BF16     Functions for one vector or few take the same steps by AVX-512, so that on a processor with AMX all agree;
 *          VDPBF16PS adds in another order.
 *
 * The unit's shapes are set and released in each call: other libraries use it too, in the same threads.
 */
#ifndef FREETOKEN_AMX_H
#define FREETOKEN_AMX_H
#include "int15.h"

#ifdef FT_X86
/* Shapes of the 8 tiles, as LDTILECFG reads them. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a row */
    uint8_t rows[16];
} ft_shapes;

#ifdef FT_AMX_TWIN
#include "amx_twin.h"
#else
/* Written out, because compilers' own versions do not all tell that they read and write memory. */
#define FT_AMX(text, ...) __asm__ volatile(text ::__VA_ARGS__ : "memory")
#define FT_TILES_SHAPE(shapes) FT_AMX("ldtilecfg %0", "m"(*(shapes)))
#define FT_TILES_RELEASE() FT_AMX("tilerelease", "i"(0))
#define FT_TILE_ZERO(t) FT_AMX("tilezero %%tmm" #t, "i"(0))
#define FT_TILE_LOAD(t, p, stride) FT_AMX("tileloadd (%0,%1,1), %%tmm" #t, "r"(p), "r"((ptrdiff_t)(stride)))
#define FT_TILE_STORE(t, p, stride) FT_AMX("tilestored %%tmm" #t ", (%0,%1,1)", "r"(p), "r"((ptrdiff_t)(stride)))
#define FT_TILE_BF16(sum, a, b) FT_AMX("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum, "i"(0))
#endif

/* n vectors are taken in sets of 16, or in one, so that one shape does for all: the last begins earlier and repeats some
 * of the set before where n is no multiple. */
typedef struct {
    int n, sets, rows;
} ft_sets;

static inline ft_sets ft_make_sets(int n) {
    const int sets = (n + 15) / 16;
    return (ft_sets){n, sets, n < 16 ? n : 16};
}

static inline int ft_set_start(ft_sets s, int set) { return set + 1 < s.sets ? set * s.rows : s.n - s.rows; }

static inline void ft_shape(ft_shapes *s, int tile, int rows, ptrdiff_t bytes) {
    s->rows[tile] = (uint8_t)rows;
    s->bytes[tile] = (uint16_t)bytes;
}

enum { FT_INT15_MANY_FROM = 12 /* 16 Xeon cores, 2048/768: 8 tokens took 1.3 times VNNI's time, 16 as long */ };

/* A block's weights as 16 lines of pairs of bf16 and its 16 scales; a block of 16 weights is there twice, once for the
 * high digits and once for the low ones, which are then one product. A bit is set for each row whose sums are halved
 * first. */
typedef uint16_t (*ft_block_lines)(const uint8_t *w, uint8_t *lines, float *scales);

enum { FT_STRIP = 16 /* blocks that are decoded at once: lines of 16 KiB, a third of the first level cache */ };

/* Block b of a strip times a set of vectors, into tile `sum`; its lines become tile `b_tile`. */
#define FT_BLOCK(sum, b_tile, b)                                                                                     \
    do {                                                                                                             \
        FT_TILE_ZERO(sum);                                                                                           \
        FT_TILE_LOAD(b_tile, lines[b], 64);                                                                          \
        FT_TILE_LOAD(4, first + 4 * block * (b), stride);                                                            \
        FT_TILE_BF16(sum, 4, b_tile);                                                                                \
        if (block == 32) {                                                                                           \
            FT_TILE_LOAD(5, first + 4 * block * (b) + 64, stride);                                                   \
            FT_TILE_BF16(sum, 5, b_tile);                                                                            \
        }                                                                                                            \
    } while (0)

#ifdef __clang__
#define FT_UNROLL
#else
#define FT_UNROLL _Pragma("GCC unroll 16") /* or an array does not become registers */
#endif

/* A strip of `blocks` times a set of `rows` vectors, at most 16. Sums stay in registers, so that the only stores are
 * those of the unit. Three blocks are on their way: while one is multiplied, the one before leaves the unit, and the sums
 * of the one before that take their scales. (A load waits for a store before it whose address differs by a multiple of
 * 4 KiB, so a block's tiles are loaded before the last one's sums are stored.) */
FT_TARGET_AMX FT_BODY ft_amx_strip(const uint8_t (*lines)[1024], const float (*scales)[16], const uint16_t *halved,
                                   int blocks, ptrdiff_t block, const uint8_t *first, const float *xscale,
                                   ptrdiff_t stride, int rows, float (*sums)[16]) {
    _Alignas(64) float parts[2][16][16]; /* of even and odd blocks */
    __m512 sum[16];
    FT_UNROLL
    for (int row = 0; row < 16; row++) sum[row] = _mm512_load_ps(sums[row]);
    FT_BLOCK(0, 6, 0);
    for (int b = 0; b <= blocks; b++) {
        if (b + 1 < blocks) {
            if (b & 1)
                FT_BLOCK(0, 6, b + 1);
            else
                FT_BLOCK(1, 7, b + 1);
        }
        if (b < blocks) {
            if (b & 1)
                FT_TILE_STORE(1, parts[1], 64);
            else
                FT_TILE_STORE(0, parts[0], 64);
        }
        if (b == 0) continue;
        const __m512 scale = _mm512_load_ps(scales[b - 1]);
        const uint16_t half = halved[b - 1];
        const float *of = xscale + b - 1;
        FT_UNROLL
        for (int row = 0; row < 16; row++, of = (const float *)((const uint8_t *)of + stride)) {
            if (row >= rows) break;
            __m512 part = _mm512_mul_ps(_mm512_load_ps(parts[(b - 1) & 1][row]), _mm512_set1_ps(*of));
            if (half) part = _mm512_mask_mul_ps(part, half, part, _mm512_set1_ps(.5f));
            sum[row] = _mm512_fmadd_ps(part, scale, sum[row]);
        }
    }
    FT_UNROLL
    for (int row = 0; row < 16; row++) _mm512_store_ps(sums[row], sum[row]);
}
#undef FT_BLOCK
#undef FT_UNROLL

/* Many INT15 vectors with a tile whose blocks, of `block` weights in `nbytes`, are decoded by `decode`; `last` multiplies
 * all sums. */
FT_TARGET_AMX FT_BODY ft_amx_int15(const uint8_t *w, ptrdiff_t k, ptrdiff_t block, ptrdiff_t nbytes, ft_block_lines decode,
                                   float last, const uint8_t *x, ptrdiff_t stride, int n, float *y) {
    _Alignas(64) uint8_t lines[FT_STRIP][1024];
    _Alignas(64) float scales[FT_STRIP][16], sums[FT_MANY][16];
    uint16_t halved[FT_STRIP];
    const ft_sets s = ft_make_sets(n);
    ft_shapes shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) ft_shape(&shapes, t, t < 6 ? s.rows : 16, 64);
    memset(sums, 0, (size_t)(s.sets * 16) * sizeof *sums);
    FT_TILES_SHAPE(&shapes);
    for (ptrdiff_t at = 0; at < k / block; at += FT_STRIP) {
        const int blocks = (int)(k / block - at < FT_STRIP ? k / block - at : FT_STRIP);
        for (int b = 0; b < blocks; b++, w += nbytes) halved[b] = decode(w, lines[b], scales[b]);
        for (int set = 0; set < s.sets; set++) {
            const uint8_t *vectors = x + ft_set_start(s, set) * stride, *first = vectors + 4 * block * at;
            const float *xscale = (const float *)(vectors + 4 * k) + at;
            if (s.rows == 16) /* a number that the compiler knows */
                ft_amx_strip(lines, scales, halved, blocks, block, first, xscale, stride, 16, sums + 16 * set);
            else
                ft_amx_strip(lines, scales, halved, blocks, block, first, xscale, stride, s.rows, sums);
        }
    }
    FT_TILES_RELEASE();
    for (int set = 0; set < s.sets; set++)
        for (int row = 0; row < s.rows; row++)
            _mm512_storeu_ps(y + 16 * (ft_set_start(s, set) + row),
                             _mm512_mul_ps(_mm512_load_ps(sums[16 * set + row]), _mm512_set1_ps(last)));
}

/* Shapes for products of k weights with sets of bf16 vectors: 16 pairs at a time in tiles 4 and 6, the rest in 5 and 7. */
static inline void ft_shape_bf16(ft_shapes *shapes, ft_sets s, ptrdiff_t k) {
    const int rest = (int)(k / 2 % 16);
    *shapes = (ft_shapes){.palette = 1};
    for (int t = 0; t < 4; t++) ft_shape(shapes, t, s.rows, 64);
    ft_shape(shapes, 4, s.rows, 64);
    ft_shape(shapes, 6, 16, 64);
    if (rest) {
        ft_shape(shapes, 5, s.rows, 4 * rest);
        ft_shape(shapes, 7, rest, 64);
    }
}

/* The sums of all sets, each set's rows to sums[set], from lines of a pair of bf16 weights of 16 rows; `ahead` of what is
 * read is fetched, if not NULL. Shapes must be those of ft_shape_bf16; `pairs` may be a multiple of 16 below that k. */
FT_TARGET_AMX FT_BODY ft_amx_bf16(const uint8_t *lines, ptrdiff_t pairs, const uint8_t *x, ptrdiff_t stride, ft_sets s,
                                  int fetch, float *const *sums) {
    const uint8_t *first[4] = {x, x, x, x};
    for (int set = 0; set < s.sets; set++) first[set] = x + ft_set_start(s, set) * stride;
#define FT_EACH(step)                                                                                                \
    do {                                                                                                             \
        step(0);                                                                                                     \
        if (s.sets > 1) step(1);                                                                                     \
        if (s.sets > 2) step(2);                                                                                     \
        if (s.sets > 3) step(3);                                                                                     \
    } while (0)
#define FT_WHOLE(set)                                                                                                \
    do {                                                                                                             \
        FT_TILE_LOAD(4, first[set] + 4 * p, stride);                                                                 \
        FT_TILE_BF16(set, 4, 6);                                                                                     \
    } while (0)
#define FT_REST(set)                                                                                                 \
    do {                                                                                                             \
        FT_TILE_LOAD(5, first[set] + 4 * p, stride);                                                                 \
        FT_TILE_BF16(set, 5, 7);                                                                                     \
    } while (0)
#define FT_STORE(set) FT_TILE_STORE(set, sums[set], 64)
    FT_EACH(FT_TILE_ZERO);
    ptrdiff_t p = 0;
    for (; p + 16 <= pairs; p += 16, lines += 1024) {
        if (fetch)
            for (int line = 0; line < 1024; line += 64) FT_PREFETCH(lines + line);
        FT_TILE_LOAD(6, lines, 64);
        FT_EACH(FT_WHOLE);
    }
    if (p < pairs) {
        FT_TILE_LOAD(7, lines, 64);
        FT_EACH(FT_REST);
    }
    FT_EACH(FT_STORE);
#undef FT_EACH
#undef FT_WHOLE
#undef FT_REST
#undef FT_STORE
}

/* Subnormals as zero, as the matrix unit has them, between the two. What is computed there must come from memory and go to
 * `results`, or the compiler may move it. */
FT_TARGET_AVX512 static inline uint32_t ft_flush_begin(void) {
    const uint32_t before = _mm_getcsr(), flushing = before | 0x8040;
    __asm__ volatile("ldmxcsr %0" ::"m"(flushing) : "memory");
    return before;
}

FT_TARGET_AVX512 static inline void ft_flush_end(uint32_t before, const void *results) {
    __asm__ volatile("ldmxcsr %0" ::"m"(before), "r"(results) : "memory");
}

/* n <= 32 bf16 activations as fp32; the others become zero. */
FT_TARGET_AVX512 static inline void ft_widen_bf16(const uint8_t *x, ptrdiff_t n, float *out) {
    const __m512i v = _mm512_maskz_loadu_epi16(n < 32 ? ((__mmask32)1 << n) - 1 : (__mmask32)-1, x);
    const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(v));
    const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(v, 1));
    _mm512_store_si512(out, _mm512_slli_epi32(low, 16));
    _mm512_store_si512(out + 16, _mm512_slli_epi32(high, 16));
}
#endif
#endif
