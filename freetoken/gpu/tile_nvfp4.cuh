/* nvfp4: four blocks of 16, each 16 e4m3 scales and two lines. e2m1 * e4m3 * 2^-8 is an fp16 number: a multiple of 2^-18
   of at most six bits, below 11. So the scales go to the weights. */
enum {
    FT_BITS = 4,
    FT_HEAD = 1,
    FT_BODY = 8,
    FT_BLOCKS = 4,
    FT_PARTS = 1,
    FT_SCALED = 1,
    FT_TOP = 8,
    FT_WEIGHTS = -8
};

/* A scale twice, times 2^6. e4m3 in fp16's places is 2^-8 times its value; the sign, of zero only, is left out. */
FT_DEVICE unsigned int ft_two_e4m3(unsigned int code) {
    return ft_mul_f16x2(code * 0x00800080u & 0x3F803F80u, 0x74007400u);
}

FT_DEVICE void ft_stage(const ft_tile &tile, const uint4 *x, float *sum) {
#pragma unroll
    for (int b = 0; b < 2; b++) {
        const uint2 codes = ft_codes(tile, 4 * b);
        const unsigned char *scales = tile.scales + 16 * (2 * b + tile.t / 2);
        const unsigned int low_scale = ft_two_e4m3(scales[0]), high_scale = ft_two_e4m3(scales[1]);
        unsigned int low[4], high[4];
        ft_e2m1(codes.x, low);
        ft_e2m1(codes.y, high);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            low[i] = ft_mul_f16x2(low[i], low_scale);
            high[i] = ft_mul_f16x2(high[i], high_scale);
        }
        ft_mma_f16(sum, low[0], high[0], low[1], high[1], x[b].x, x[b].y);
        ft_mma_f16(sum, low[2], high[2], low[3], high[3], x[b].z, x[b].w);
    }
}
