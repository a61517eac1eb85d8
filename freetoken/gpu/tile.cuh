/* What the formats' pieces are given and share. A piece is 32 weights of each of a tile's 16 rows; a warp multiplies it with
   up to 8 vectors, or with ONE. A unit is the fewest pieces that are whole blocks of the record; a stage is FT_STAGE_UNITS
   units, in shared memory as they are there.

   Of a line, lane 4 g + t reads rows 2 g and 2 g + 1, 8 bytes; of four lines, line t. So these are rows g and g + 8 of a
   matrix product, and columns are permuted: vectors come in the same order, 64 bytes for each piece, see ft_place. */
struct ft_tile {
    const unsigned char *codes;  /* this lane's of a unit's first four lines: ft_codes_at(g, t) */
    const unsigned char *scales; /* those of this lane's rows in a unit's first block: ft_scales_at(g, t) */
};

/* sum += part, whose rows count `low` and `high` times. With ONE vector, odd columns are left alone. */
template <bool ONE> FT_DEVICE void ft_add(float *sum, const float *part, float low, float high) {
    sum[0] += part[0] * low;
    sum[2] += part[2] * high;
    if (ONE) return;
    sum[1] += part[1] * low;
    sum[3] += part[3] * high;
}

/* Eight e2m1 codes as fp16 numbers, times 2^-14: pair i is codes i and i + 4. fp16 with e2m1's exponent and mantissa bits
   from bit 9 on and zeros elsewhere is that, where e2m1 is subnormal, too. First each byte gets the sign and those bits
   of one code where fp16 has them in its upper byte, and something in between; then a mask takes every other byte. */
FT_DEVICE void ft_e2m1(unsigned int codes, unsigned int *pairs) {
    const unsigned int even = ft_choose(0x80808080u, codes << 4, codes << 1);
    const unsigned int odd = ft_choose(0x80808080u, codes, codes >> 3);
    pairs[0] = even << 8 & 0x8E008E00u;
    pairs[1] = odd << 8 & 0x8E008E00u;
    pairs[2] = even & 0x8E008E00u;
    pairs[3] = odd & 0x8E008E00u;
}
