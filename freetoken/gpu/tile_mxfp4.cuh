/* mxfp4 and ds_fp4: a piece is a block of 32, 16 e8m0 scales and four lines. Weights are exact in fp16, scales go to the
   sum of a block, in fp32. */
enum {
    FT_BITS = 4,
    FT_PIECES = 1, /* of a unit */
    FT_UNIT = 272,  /* bytes of a unit of a tile */
    FT_STAGE_UNITS = 8,
    FT_SCALED = 1,
    FT_TOP = 14, /* log2 of what activations are scaled to: the weights' 2^-14 is made up for */
    FT_WEIGHTS = -14
};

FT_DEVICE int ft_codes_at(int g, int t) { return 16 + 64 * t + 8 * g; }
FT_DEVICE int ft_scales_at(int g, int) { return 2 * g; }

/* 2^(code - 127). 2^-127 is no normal number, and its bits are the least of all. */
FT_DEVICE float ft_e8m0(unsigned int code) { return ft_float(ft_max(code << 23, 0x00400000u)); }

template <bool ONE> FT_DEVICE void ft_piece(const ft_tile &tile, int, const uint4 &x, float *sum) {
    const uint2 codes = *(const uint2 *)(tile.codes);
    const unsigned char *scales = tile.scales;
    unsigned int low[4], high[4];
    ft_e2m1(codes.x, low);
    ft_e2m1(codes.y, high);
    float part[4] = {0, 0, 0, 0};
    ft_mma_f16(part, low[0], high[0], low[1], high[1], x.x, x.y);
    ft_mma_f16(part, low[2], high[2], low[3], high[3], x.z, x.w);
    ft_add<ONE>(sum, part, ft_e8m0(scales[0]), ft_e8m0(scales[1]));
}
