/* q8_0: a piece is a block of 32, 16 fp16 scales and eight lines. 1024 + 128 + code is fp16 with code + 128 in its lowest
   byte. */
enum {
    FT_BITS = 8,
    FT_PIECES = 1, /* of a unit */
    FT_UNIT = 544,  /* bytes of a unit of a tile */
    FT_STAGE_UNITS = 4,
    FT_SCALED = 1,
    FT_TOP = 8,
    FT_WEIGHTS = 0
};

FT_DEVICE int ft_codes_at(int g, int t) { return 32 + 64 * t + 8 * g; }
FT_DEVICE int ft_scales_at(int g, int) { return 4 * g; }

FT_DEVICE void ft_int8(unsigned int codes, unsigned int *pairs) {
    codes ^= 0x80808080u;
    pairs[0] = ft_fma_f16x2(ft_bytes(codes, 0x64646464u, 0x4140), 0x3C003C00u, 0xE480E480u);
    pairs[1] = ft_fma_f16x2(ft_bytes(codes, 0x64646464u, 0x4342), 0x3C003C00u, 0xE480E480u);
}

template <bool ONE> FT_DEVICE void ft_piece(const ft_tile &tile, int, const uint4 &x, float *sum) {
    const unsigned int scales = *(const unsigned int *)(tile.scales);
    const uint2 first = *(const uint2 *)(tile.codes);
    const uint2 second = *(const uint2 *)(tile.codes + 256);
    unsigned int low[4], high[4];
    ft_int8(first.x, low);
    ft_int8(first.y, high);
    ft_int8(second.x, low + 2);
    ft_int8(second.y, high + 2);
    float part[4] = {0, 0, 0, 0};
    ft_mma_f16(part, low[0], high[0], low[1], high[1], x.x, x.y);
    ft_mma_f16(part, low[2], high[2], low[3], high[3], x.z, x.w);
    ft_add<ONE>(sum, part, ft_from_f16(scales), ft_from_f16(scales >> 16));
}
