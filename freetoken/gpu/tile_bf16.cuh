/* bf16: a piece is sixteen lines of two weights, as they are. */
enum {
    FT_BITS = 16,
    FT_PIECES = 1, /* of a unit */
    FT_UNIT = 1024,  /* bytes of a unit of a tile */
    FT_STAGE_UNITS = 2,
    FT_SCALED = 0,
    FT_TOP = 0,
    FT_WEIGHTS = 0
};

FT_DEVICE int ft_codes_at(int g, int t) { return 64 * t + 8 * g; }
FT_DEVICE int ft_scales_at(int, int) { return 0; }

template <bool ONE> FT_DEVICE void ft_piece(const ft_tile &tile, int, const uint4 &x, float *sum) {
    uint2 w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = *(const uint2 *)(tile.codes + 256 * i);
    ft_mma_bf16(sum, w[0].x, w[0].y, w[1].x, w[1].y, x.x, x.y);
    ft_mma_bf16(sum, w[2].x, w[2].y, w[3].x, w[3].y, x.z, x.w);
}
