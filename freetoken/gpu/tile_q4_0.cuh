/* q4_0: a piece is a block of 32, 16 fp16 scales and four lines. 1024 + code is fp16 with the code in its lowest bits. */
enum {
    FT_BITS = 4,
    FT_PIECES = 1, /* of a unit */
    FT_UNIT = 288,  /* bytes of a unit of a tile */
    FT_STAGE_UNITS = 8,
    FT_SCALED = 1,
    FT_TOP = 8,
    FT_WEIGHTS = 0
};

FT_DEVICE int ft_codes_at(int g, int t) { return 32 + 64 * t + 8 * g; }
FT_DEVICE int ft_scales_at(int g, int) { return 4 * g; }

/* Codes i and i + 4, less 8; those at bit 4 count 16 times. */
FT_DEVICE void ft_less_8(unsigned int codes, unsigned int *pairs) {
    const unsigned int later = codes >> 8, one = 0x3C003C00u, sixteenth = 0x2C002C00u;
    pairs[0] = ft_fma_f16x2((codes & 0x000F000Fu) | 0x64006400u, one, 0xE408E408u);
    pairs[1] = ft_fma_f16x2((codes & 0x00F000F0u) | 0x64006400u, sixteenth, 0xD480D480u);
    pairs[2] = ft_fma_f16x2((later & 0x000F000Fu) | 0x64006400u, one, 0xE408E408u);
    pairs[3] = ft_fma_f16x2((later & 0x00F000F0u) | 0x64006400u, sixteenth, 0xD480D480u);
}

template <bool ONE> FT_DEVICE void ft_piece(const ft_tile &tile, int, const uint4 &x, float *sum) {
    const uint2 codes = *(const uint2 *)(tile.codes);
    const unsigned int scales = *(const unsigned int *)(tile.scales);
    unsigned int low[4], high[4];
    ft_less_8(codes.x, low);
    ft_less_8(codes.y, high);
    float part[4] = {0, 0, 0, 0};
    ft_mma_f16(part, low[0], high[0], low[1], high[1], x.x, x.y);
    ft_mma_f16(part, low[2], high[2], low[3], high[3], x.z, x.w);
    ft_add<ONE>(sum, part, ft_from_f16(scales), ft_from_f16(scales >> 16));
}
