/* nvfp4: a piece is two blocks of 16, each 16 e4m3 scales and two lines. e2m1 * e4m3 * 2^-8 is an fp16 number: a multiple
   of 2^-18 of at most six bits, below 11. So the scales go to the weights. */
enum {
    FT_BITS = 4,
    FT_PIECES = 1, /* of a unit */
    FT_UNIT = 288,  /* bytes of a unit of a tile */
    FT_STAGE_UNITS = 8,
    FT_SCALED = 1,
    FT_TOP = 8,
    FT_WEIGHTS = -8
};

FT_DEVICE int ft_codes_at(int g, int t) { return 16 + t / 2 * 144 + t % 2 * 64 + 8 * g; }
FT_DEVICE int ft_scales_at(int g, int t) { return t / 2 * 144 + 2 * g; }

/* A scale twice, times 2^6. e4m3 in fp16's places is 2^-8 times its value; the sign, of zero only, is left out. */
FT_DEVICE unsigned int ft_two_e4m3(unsigned int code) {
    return ft_mul_f16x2(code * 0x00800080u & 0x3F803F80u, 0x74007400u);
}

template <bool ONE> FT_DEVICE void ft_piece(const ft_tile &tile, int, const uint4 &x, float *sum) {
    const uint2 codes = *(const uint2 *)(tile.codes);
    const unsigned char *scales = tile.scales;
    const unsigned int low_scale = ft_two_e4m3(scales[0]), high_scale = ft_two_e4m3(scales[1]);
    unsigned int low[4], high[4];
    ft_e2m1(codes.x, low);
    ft_e2m1(codes.y, high);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        low[i] = ft_mul_f16x2(low[i], low_scale);
        high[i] = ft_mul_f16x2(high[i], high_scale);
    }
    ft_mma_f16(sum, low[0], high[0], low[1], high[1], x.x, x.y);
    ft_mma_f16(sum, low[2], high[2], low[3], high[3], x.z, x.w);
}
