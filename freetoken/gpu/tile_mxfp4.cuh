/* mxfp4 and ds_fp4: two blocks of 32, each 16 e8m0 scales and four lines. Weights are exact in fp16, scales go to the sum
   of a block, in fp32. */
enum {
    FT_BITS = 4,
    FT_HEAD = 1,   /* chunks of 16 bytes of scales */
    FT_BODY = 16,  /* and of codes after them */
    FT_BLOCKS = 2,
    FT_PARTS = 1,
    FT_SCALED = 1,
    FT_TOP = 14,   /* log2 of what activations are scaled to: the weights' 2^-14 is made up for */
    FT_WEIGHTS = -14
};

/* 2^(code - 127). 2^-127 is no normal number, and its bits are the least of all. */
FT_DEVICE float ft_e8m0(unsigned int code) { return ft_float(ft_max(code << 23, 0x00400000u)); }

FT_DEVICE void ft_stage(const ft_tile &tile, const uint4 *x, float *sum) {
#pragma unroll
    for (int b = 0; b < 2; b++) {
        const uint2 codes = ft_codes(tile, 4 * b);
        unsigned int low[4], high[4];
        ft_e2m1(codes.x, low);
        ft_e2m1(codes.y, high);
        float part[4] = {0, 0, 0, 0};
        ft_mma_f16(part, low[0], high[0], low[1], high[1], x[b].x, x[b].y);
        ft_mma_f16(part, low[2], high[2], low[3], high[3], x[b].z, x[b].w);
        ft_add(sum, part, ft_e8m0(tile.scales[16 * b]), ft_e8m0(tile.scales[16 * b + 1]));
    }
}
