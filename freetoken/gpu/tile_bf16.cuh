/* bf16: sixteen lines of two weights, as they are. */
enum {
    FT_BITS = 16,
    FT_HEAD = 0,
    FT_BODY = 64,
    FT_BLOCKS = 1,
    FT_PARTS = 1,
    FT_SCALED = 0,
    FT_TOP = 0,
    FT_WEIGHTS = 0
};

FT_DEVICE void ft_stage(const ft_tile &tile, const uint4 *x, float *sum) {
    const uint2 w0 = ft_codes(tile, 0), w1 = ft_codes(tile, 4), w2 = ft_codes(tile, 8), w3 = ft_codes(tile, 12);
    ft_mma_bf16(sum, w0.x, w0.y, w1.x, w1.y, x->x, x->y);
    ft_mma_bf16(sum, w2.x, w2.y, w3.x, w3.y, x->z, x->w);
}
