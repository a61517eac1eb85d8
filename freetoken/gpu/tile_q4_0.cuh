/* q4_0: two blocks of 32, each 16 fp16 scales and four lines. 1024 + code is fp16 with the code in its lowest bits. */
enum {
    FT_BITS = 4,
    FT_HEAD = 2,
    FT_BODY = 16,
    FT_BLOCKS = 2,
    FT_PARTS = 1,
    FT_SCALED = 1,
    FT_TOP = 8,
    FT_WEIGHTS = 0
};

/* Codes i and i + 4, less 8; those at bit 4 count 16 times. */
FT_DEVICE void ft_less_8(unsigned int codes, unsigned int *pairs) {
    const unsigned int later = codes >> 8, one = 0x3C003C00u, sixteenth = 0x2C002C00u;
    pairs[0] = ft_fma_f16x2((codes & 0x000F000Fu) | 0x64006400u, one, 0xE408E408u);
    pairs[1] = ft_fma_f16x2((codes & 0x00F000F0u) | 0x64006400u, sixteenth, 0xD480D480u);
    pairs[2] = ft_fma_f16x2((later & 0x000F000Fu) | 0x64006400u, one, 0xE408E408u);
    pairs[3] = ft_fma_f16x2((later & 0x00F000F0u) | 0x64006400u, sixteenth, 0xD480D480u);
}

FT_DEVICE void ft_stage(const ft_tile &tile, const uint4 *x, float *sum) {
#pragma unroll
    for (int b = 0; b < 2; b++) {
        const uint2 codes = ft_codes(tile, 4 * b);
        const unsigned int scales = *(const unsigned int *)(tile.scales + 32 * b);
        unsigned int low[4], high[4];
        ft_less_8(codes.x, low);
        ft_less_8(codes.y, high);
        float part[4] = {0, 0, 0, 0};
        ft_mma_f16(part, low[0], high[0], low[1], high[1], x[b].x, x[b].y);
        ft_mma_f16(part, low[2], high[2], low[3], high[3], x[b].z, x[b].w);
        ft_add(sum, part, ft_from_f16(scales), ft_from_f16(scales >> 16));
    }
}
