/* Rows as files hold them, permuted into the tiles of formats/base.py: what Format.pack does, without a copy between.
 *
 * Only dwords move, and the nibbles of ggml's blocks. Vectors are the compiler's own, of 16 bytes, which every processor
 * has: 4 x 4 dwords are transposed at a time. On the way codes and scales are looked through for bits that no number
 * has; whoever finds some decides elsewhere what they are.
 */
#ifndef FREETOKEN_TILING_H
#define FREETOKEN_TILING_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    FT_ROWS = 16,
    FT_LINE = 64,
    FT_WRITE_AHEAD = 2048 /* lines of tiles are asked for so early: that raises 0.78 of a plain read to 0.87 */
};

typedef uint32_t ft_dwords __attribute__((vector_size(16)));
typedef uint16_t ft_words __attribute__((vector_size(16)));
typedef uint8_t ft_bytes __attribute__((vector_size(16)));

#ifdef __clang__
#define FT_PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FT_PICK(a, b, ...) __builtin_shuffle(a, b, (__typeof__(a)){__VA_ARGS__})
#endif

/* How rows lie in the file and in a tile. Bytes are those of one row. */
typedef struct {
    ptrdiff_t codes;       /* all code bytes that are wanted */
    ptrdiff_t block_codes; /* of a whole block; without scales the row is one block */
    ptrdiff_t code_step;   /* from a block's codes to the next one's, in the file */
    ptrdiff_t scale_bytes; /* of a scale; 0 without */
    ptrdiff_t scale_step;  /* as code_step */
    int halves;            /* blocks of 16 bytes as ggml packs nibbles: byte j holds weights j and j + 16 */
    int code_width;        /* bytes of a code that is looked through, 0 for none */
    uint32_t code_bits;    /* such a code is suspicious if it has all these bits */
    uint32_t scale_bits[2];/* the same of scales, either set; 0 for none */
} ft_tiling;

static inline ft_dwords ft_load(const uint8_t *from) {
    ft_dwords v;
    memcpy(&v, from, 16);
    return v;
}

/* Byte j = weights (j, j + 16) to byte j = weights (2 j, 2 j + 1). */
static inline ft_dwords ft_pair_nibbles(ft_dwords v) {
    const ft_words w = (ft_words)v; /* low byte: weights 2 j and 2 j + 16; high byte: 2 j + 1 and 2 j + 17 */
    const ft_words first = (w & 0x000F) | ((w >> 4) & 0x00F0), second = ((w >> 4) & 0x000F) | ((w >> 8) & 0x00F0);
    return (ft_dwords)FT_PICK((ft_bytes)first, (ft_bytes)second, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}

/* All ones in the lanes of `v` that have all of `bits`; width is a constant. */
static inline ft_dwords ft_match(ft_dwords v, int width, uint32_t bits) {
    if (width == 4) {
        const ft_dwords mask = (ft_dwords){0} + bits;
        return (ft_dwords)((v & mask) == mask);
    }
    if (width == 2) {
        const ft_words mask = (ft_words){0} + (uint16_t)bits;
        return (ft_dwords)(((ft_words)v & mask) == mask);
    }
    const ft_bytes mask = (ft_bytes){0} + (uint8_t)bits;
    return (ft_dwords)(((ft_bytes)v & mask) == mask);
}

/* 16 bytes of each of the 16 rows into four lines. */
static inline __attribute__((always_inline)) void ft_lines(const uint8_t *const *rows, ptrdiff_t at, uint8_t *const *lines,
                                                           int halves, int width, uint32_t bits, ft_dwords *found) {
    ft_dwords out[4][FT_ROWS / 4];
    for (int i = 0; i < 4; i++) __builtin_prefetch(lines[i] + FT_WRITE_AHEAD, 1);
    for (int r = 0; r < FT_ROWS; r += 4) {
        ft_dwords v[4];
        for (int i = 0; i < 4; i++) {
            v[i] = ft_load(rows[r + i] + at);
            if (halves) v[i] = ft_pair_nibbles(v[i]);
            if (width) *found |= ft_match(v[i], width, bits);
        }
        const ft_dwords a = FT_PICK(v[0], v[1], 0, 4, 1, 5), b = FT_PICK(v[0], v[1], 2, 6, 3, 7);
        const ft_dwords c = FT_PICK(v[2], v[3], 0, 4, 1, 5), d = FT_PICK(v[2], v[3], 2, 6, 3, 7);
        out[0][r / 4] = FT_PICK(a, c, 0, 1, 4, 5);
        out[1][r / 4] = FT_PICK(a, c, 2, 3, 6, 7);
        out[2][r / 4] = FT_PICK(b, d, 0, 1, 4, 5);
        out[3][r / 4] = FT_PICK(b, d, 2, 3, 6, 7);
    }
    for (int i = 0; i < 4; i++) memcpy(lines[i], out[i], FT_LINE);
}

/* One dword of each of the 16 rows into a line: what is left of a row. */
static inline void ft_line(const uint8_t *const *rows, ptrdiff_t at, uint8_t *line, int width, uint32_t bits,
                           ft_dwords *found) {
    for (int r = 0; r < FT_ROWS; r++) {
        uint32_t dword;
        memcpy(&dword, rows[r] + at, 4);
        memcpy(line + 4 * r, &dword, 4);
        if (width) *found |= ft_match((ft_dwords){dword}, width, bits);
    }
}

static inline __attribute__((always_inline)) int ft_codes(const ft_tiling *t, const uint8_t *const *rows, uint8_t *tile,
                                                          int halves, int width) {
    const ptrdiff_t head = FT_ROWS * t->scale_bytes, of_block = t->block_codes / 4;
    /* Blocks that lie side by side in the file are one run. */
    const ptrdiff_t run = t->code_step == t->block_codes ? t->codes : t->block_codes;
    ft_dwords found = {0};
    uint8_t *next = tile + head;
    ptrdiff_t in_block = 0;
#define FT_NEXT_LINE(line)                    \
    do {                                      \
        if (in_block == of_block) {           \
            next += head;                     \
            in_block = 0;                     \
        }                                     \
        (line) = next;                        \
        next += FT_LINE;                      \
        in_block++;                           \
    } while (0)
    for (ptrdiff_t done = 0, from = 0; done < t->codes; done += run, from += t->code_step) {
        const ptrdiff_t bytes = run < t->codes - done ? run : t->codes - done;
        ptrdiff_t at = from;
        for (; at + 16 <= from + bytes; at += 16) {
            uint8_t *lines[4];
            for (int i = 0; i < 4; i++) FT_NEXT_LINE(lines[i]);
            ft_lines(rows, at, lines, halves, width, t->code_bits, &found);
        }
        for (; at < from + bytes; at += 4) {
            uint8_t *line;
            FT_NEXT_LINE(line);
            ft_line(rows, at, line, width, t->code_bits, &found);
        }
    }
#undef FT_NEXT_LINE
    const ft_dwords any = found;
    return (any[0] | any[1] | any[2] | any[3]) != 0;
}

/* Scales of 16 blocks, a byte each and side by side: a transposition of 16 x 16 bytes. */
static inline void ft_byte_scales(const uint8_t *const *rows, ptrdiff_t at, uint8_t *out, ptrdiff_t block_bytes) {
    ft_bytes v[FT_ROWS], w[FT_ROWS];
    for (int r = 0; r < FT_ROWS; r++) memcpy(&v[r], rows[r] + at, 16);
    for (int stage = 0; stage < 4; stage++) { /* each interleaves row r with row r + 8 */
        for (int r = 0; r < FT_ROWS / 2; r++) {
            w[2 * r] = FT_PICK(v[r], v[r + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            w[2 * r + 1] = FT_PICK(v[r], v[r + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        memcpy(v, w, sizeof v);
    }
    for (int b = 0; b < FT_ROWS; b++) memcpy(out + b * block_bytes, &v[b], 16);
}

static inline __attribute__((always_inline)) int ft_scales(const ft_tiling *t, const uint8_t *const *rows, uint8_t *tile,
                                                           int width) {
    const ptrdiff_t blocks = (t->codes + t->block_codes - 1) / t->block_codes;
    const ptrdiff_t block_bytes = FT_ROWS * width + FT_LINE * (t->block_codes / 4);
    ptrdiff_t b = 0;
    int found = 0;
    if (width == 1 && t->scale_step == 1)
        for (; b + FT_ROWS <= blocks; b += FT_ROWS) ft_byte_scales(rows, b, tile + b * block_bytes, block_bytes);
    for (; b < blocks; b++)
        for (int r = 0; r < FT_ROWS; r++)
            memcpy(tile + b * block_bytes + r * width, rows[r] + b * t->scale_step, (size_t)width);
    for (int i = 0; i < 2; i++) {
        if (!t->scale_bits[i]) continue;
        ft_dwords any = {0};
        for (b = 0; b < blocks; b++)
            for (int part = 0; part < width; part++)
                any |= ft_match(ft_load(tile + b * block_bytes + 16 * part), width, t->scale_bits[i]);
        found |= (any[0] | any[1] | any[2] | any[3]) != 0;
    }
    return found;
}

/* Whether one of n bytes has all of some bits. */
static inline int ft_has_byte(const uint8_t *bytes, ptrdiff_t n, uint32_t bits) {
    ft_dwords any = {0};
    for (; n >= 16; n -= 16, bytes += 16) any |= ft_match(ft_load(bytes), 1, bits);
    int found = (any[0] | any[1] | any[2] | any[3]) != 0;
    for (; n > 0; n--, bytes++) found |= (*bytes & bits) == bits;
    return found;
}

/* One tile from 16 rows of codes and of scales (none without); whether something in them is suspicious. */
static int ft_write_tile(const ft_tiling *t, const uint8_t *const *codes, const uint8_t *const *scales, uint8_t *tile) {
    int found = 0;
    if (t->halves)
        found |= ft_codes(t, codes, tile, 1, 0);
    else if (t->code_width == 2)
        found |= ft_codes(t, codes, tile, 0, 2);
    else if (t->code_width == 1)
        found |= ft_codes(t, codes, tile, 0, 1);
    else
        found |= ft_codes(t, codes, tile, 0, 0);
    if (t->scale_bytes == 1)
        found |= ft_scales(t, scales, tile, 1);
    else if (t->scale_bytes == 2)
        found |= ft_scales(t, scales, tile, 2);
    else if (t->scale_bytes == 4)
        found |= ft_scales(t, scales, tile, 4);
    return found;
}
#endif
