/* fp8_block: a unit is a block of 128, 16 fp32 scales and 32 lines, of which a piece has eight. The bits of e4m3 in fp16's
   places are 2^-8 times its value, where it is subnormal, too. */
enum {
    FT_BITS = 8,
    FT_PIECES = 4, /* of a unit */
    FT_UNIT = 2112,  /* bytes of a unit of a tile */
    FT_STAGE_UNITS = 1,
    FT_SCALED = 1,
    FT_TOP = 8,
    FT_WEIGHTS = -8
};

FT_DEVICE int ft_codes_at(int g, int t) { return 64 + 64 * t + 8 * g; }
FT_DEVICE int ft_scales_at(int g, int) { return 8 * g; }

FT_DEVICE unsigned int ft_e4m3(unsigned int high_bytes) {
    return (high_bytes & 0x80008000u) | ((high_bytes >> 1) & 0x3F803F80u);
}

template <bool ONE> FT_DEVICE void ft_piece(const ft_tile &tile, int piece, const uint4 &x, float *sum) {
    const float2 scales = *(const float2 *)tile.scales;
    const uint2 first = *(const uint2 *)(tile.codes + 512 * piece);
    const uint2 second = *(const uint2 *)(tile.codes + 512 * piece + 256);
    const unsigned int rows[4] = {first.x, first.y, second.x, second.y};
    unsigned int pairs[8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        pairs[2 * i] = ft_e4m3(ft_bytes(rows[i], 0, 0x1404));
        pairs[2 * i + 1] = ft_e4m3(ft_bytes(rows[i], 0, 0x3424));
    }
    float part[4] = {0, 0, 0, 0};
    ft_mma_f16(part, pairs[0], pairs[2], pairs[1], pairs[3], x.x, x.y);
    ft_mma_f16(part, pairs[4], pairs[6], pairs[5], pairs[7], x.z, x.w);
    ft_add<ONE>(sum, part, scales.x, scales.y);
}
