/* The matrix unit in plain C, as Intel's manual defines its instructions, for processors without one: a build with
 * -DFT_AMX_TWIN and this folder among the include folders takes it in place of the instructions (`make twin`). It stops the
 * process where the unit would raise an exception.
 */
#ifndef FREETOKEN_AMX_TWIN_H
#define FREETOKEN_AMX_TWIN_H
#include <math.h>
#include <stdlib.h>

typedef struct {
    ft_shapes shapes;
    uint8_t data[8][16][64];
} ft_twin;

static __thread ft_twin ft_unit;

static inline void ft_twin_need(int holds) {
    if (!holds) abort();
}

static inline void ft_twin_shape(const ft_shapes *shapes) {
    memset(&ft_unit, 0, sizeof ft_unit);
    ft_unit.shapes = *shapes;
    ft_twin_need(shapes->palette == 1 && shapes->start_row == 0);
    for (int t = 0; t < 16; t++) {
        ft_twin_need(shapes->rows[t] <= 16 && shapes->bytes[t] <= 64 && (t < 8 || !shapes->rows[t]));
        ft_twin_need(!shapes->rows[t] == !shapes->bytes[t]);
    }
}

static inline void ft_twin_zero(int t) {
    ft_twin_need(ft_unit.shapes.rows[t]);
    memset(ft_unit.data[t], 0, sizeof ft_unit.data[t]);
}

static inline void ft_twin_load(int t, const void *p, ptrdiff_t stride) {
    ft_twin_zero(t);
    for (int row = 0; row < ft_unit.shapes.rows[t]; row++)
        memcpy(ft_unit.data[t][row], (const uint8_t *)p + row * stride, ft_unit.shapes.bytes[t]);
}

static inline void ft_twin_store(int t, void *p, ptrdiff_t stride) {
    ft_twin_need(ft_unit.shapes.rows[t]);
    for (int row = 0; row < ft_unit.shapes.rows[t]; row++)
        memcpy((uint8_t *)p + row * stride, ft_unit.data[t][row], ft_unit.shapes.bytes[t]);
}

static inline void ft_twin_fit(int sum, int a, int b) {
    const ft_shapes *s = &ft_unit.shapes;
    ft_twin_need(s->rows[sum] && s->rows[sum] == s->rows[a] && s->bytes[sum] == s->bytes[b]);
    ft_twin_need(s->bytes[a] == 4 * s->rows[b] && s->bytes[sum] % 4 == 0);
}

static inline void ft_twin_int8(int sum, int a, int b) {
    ft_twin_fit(sum, a, b);
    for (int row = 0; row < ft_unit.shapes.rows[sum]; row++)
        for (int i = 0; i < ft_unit.shapes.rows[b]; i++)
            for (int column = 0; column < ft_unit.shapes.bytes[sum] / 4; column++) {
                int32_t total;
                uint8_t *at = ft_unit.data[sum][row] + 4 * column;
                memcpy(&total, at, 4);
                for (int part = 0; part < 4; part++)
                    total += (int8_t)ft_unit.data[a][row][4 * i + part] * (int8_t)ft_unit.data[b][i][4 * column + part];
                memcpy(at, &total, 4);
            }
}

/* Subnormals, as operands and as results, are zeros of their sign. */
static inline float ft_twin_flush(float value) { return fabsf(value) < 0x1p-126f ? copysignf(0, value) : value; }

static inline float ft_twin_bf16(const uint8_t *p) {
    return ft_twin_flush(ft_bits_to_float((uint32_t)p[1] << 24 | (uint32_t)p[0] << 16));
}

static inline void ft_twin_bf16_product(int sum, int a, int b) {
    ft_twin_fit(sum, a, b);
    for (int row = 0; row < ft_unit.shapes.rows[sum]; row++)
        for (int column = 0; column < ft_unit.shapes.bytes[sum] / 4; column++) {
            float part[2] = {0, 0}, total;
            for (int i = 0; i < ft_unit.shapes.rows[b]; i++)
                for (int half = 0; half < 2; half++)
                    part[half] = ft_twin_flush(fmaf(ft_twin_bf16(ft_unit.data[a][row] + 4 * i + 2 * half),
                                                    ft_twin_bf16(ft_unit.data[b][i] + 4 * column + 2 * half),
                                                    part[half]));
            uint8_t *at = ft_unit.data[sum][row] + 4 * column;
            memcpy(&total, at, 4);
            total = ft_twin_flush(ft_twin_flush(total) + ft_twin_flush(part[0] + part[1]));
            memcpy(at, &total, 4);
        }
}

#define FT_TILES_SHAPE(shapes) ft_twin_shape(shapes)
#define FT_TILES_RELEASE() memset(&ft_unit, 0, sizeof ft_unit)
#define FT_TILE_ZERO(t) ft_twin_zero(t)
#define FT_TILE_LOAD(t, p, stride) ft_twin_load(t, p, stride)
#define FT_TILE_STORE(t, p, stride) ft_twin_store(t, p, stride)
#define FT_TILE_INT8(sum, a, b) ft_twin_int8(sum, a, b)
#define FT_TILE_BF16(sum, a, b) ft_twin_bf16_product(sum, a, b)
#endif
