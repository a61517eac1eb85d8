/* A GEMV over slots: for each unit, one expert's record and up to 8 routes that use it, gate, up and activation, or down.

   Rows of activations become vectors in the order of the tiles, as fp16 under a power of two for each (bf16 for bf16
   weights), so that any magnitude keeps its bits. fp32 models have each number as three digits in three vectors, which
   hold all of it. prepare_x, prepare_h do that once for all blocks; for few rows every block does it for itself, while its
   first weights come, which saves two kernels.

   gate_up, down: a block of FT_WARPS warps takes a few tiles of one unit (gate_up: one of gate and one of up) and reads
   each byte of them once, whatever the number of routes: tensor cores multiply 16 rows by 8 vectors. Each warp has a run
   of the tiles' units and a ring of stages in shared memory, and copies ahead of what it multiplies, so many bytes are on
   their way with few threads. The sums of the warps meet in the end, in a fixed order.

   Where devices have it (sm_90), each kernel starts before the one before it has ended and begins with what does not
   depend on that: down reads its first weights while gate_up runs.

   Before this stand, as constants: HIDDEN, INTERMEDIATE, the bytes of their tiles and the record's offsets (gemv_cuda.py);
   device.cuh, tile.cuh and a format's tile_<name>.cuh. */
enum {
    FT_ROWS = 16,
    FT_COLUMNS = 8,
    FT_THREADS = 32 * FT_WARPS,
    FT_UNIT_K = 32 * FT_PIECES,
    FT_UNITS = FT_WANTED_UNITS ? FT_WANTED_UNITS : FT_STAGE_UNITS, /* of a stage */
    FT_STAGE = FT_UNITS * FT_UNIT,
    FT_DIGITS = FT_EXACT ? 3 : 1
};

struct ft_f16 {
    unsigned short bits;
};
struct ft_bf16 {
    unsigned short bits;
};

FT_DEVICE float ft_value(ft_f16 x) { return ft_from_f16(x.bits); }
FT_DEVICE float ft_value(ft_bf16 x) { return ft_float((unsigned int)x.bits << 16); }
FT_DEVICE float ft_value(float x) { return x; }

/* Two numbers as vectors hold them, and what they are then. */
FT_DEVICE unsigned int ft_narrow(float low, float high) {
    return FT_SCALED ? ft_to_f16x2(low, high) : ft_to_bf16x2(low, high);
}
FT_DEVICE float ft_widen(unsigned int bits) { return FT_SCALED ? ft_from_f16(bits & 0xFFFFu) : ft_float(bits << 16); }

template <typename X> union ft_eight {
    uint4 words[sizeof(X) / 2];
    X items[8];
};

/* 8 items from k on, of which those past the end are anything. */
template <typename X, int K> FT_DEVICE void ft_load(const X *x, int k, bool aligned, ft_eight<X> &to) {
    if (K % 8 == 0 && aligned) {
#pragma unroll
        for (int i = 0; i < (int)sizeof(X) / 2; i++) to.words[i] = ((const uint4 *)(x + (k < K ? k : 0)))[i];
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) to.items[i] = x[k + i < K ? k + i : K - 1];
    }
}

/* Their values, zeros past the end. */
template <typename X, int K> FT_DEVICE void ft_values(const ft_eight<X> &from, int k, float *values) {
#pragma unroll
    for (int i = 0; i < 8; i++) values[i] = k + i < K ? ft_value(from.items[i]) : 0.0f;
}

/* Put 8 values from k on into a vector, in the order in which lanes read it: 16 bytes for each t of a piece; `stride` from
   piece to piece. */
FT_DEVICE void ft_place(unsigned char *vector, int stride, int k, const float *v) {
    unsigned char *to = vector + k / 32 * stride;
    if (FT_BITS == 4) { /* line t has 8 weights, codes i and i + 4 are a pair */
        *(uint4 *)(to + k % 32 * 2) =
            make_uint4(ft_narrow(v[0], v[4]), ft_narrow(v[1], v[5]), ft_narrow(v[2], v[6]), ft_narrow(v[3], v[7]));
    } else if (FT_BITS == 8) { /* lines t and t + 4 have 4 weights each */
        unsigned char *line = to + k % 16 * 4 + k % 32 / 16 * 8;
        *(uint2 *)line = make_uint2(ft_narrow(v[0], v[1]), ft_narrow(v[2], v[3]));
        *(uint2 *)(line + 16) = make_uint2(ft_narrow(v[4], v[5]), ft_narrow(v[6], v[7]));
    } else { /* lines t, t + 4, t + 8 and t + 12 have 2 */
#pragma unroll
        for (int t = 0; t < 4; t++) *(unsigned int *)(to + 16 * t + k % 32 / 8 * 4) = ft_narrow(v[2 * t], v[2 * t + 1]);
    }
}

/* Digits of 8 values in vectors `digit` bytes apart, each digit 2^-11 (bf16: 2^-8) of the last; what is left goes into the
   next. */
FT_DEVICE void ft_place_digits(unsigned char *vector, int stride, int digit, int k, float *v) {
#pragma unroll
    for (int d = 0; d < FT_DIGITS; d++) {
        ft_place(vector + d * digit, stride, k, v);
        if (d + 1 < FT_DIGITS)
#pragma unroll
            for (int i = 0; i < 8; i++)
                v[i] = (v[i] - ft_widen(ft_narrow(v[i], 0.0f))) * (FT_SCALED ? 2048.0f : 256.0f);
    }
}

FT_DEVICE float ft_join_digits(const float *sums) {
    float sum = 0.0f;
#pragma unroll
    for (int d = FT_DIGITS - 1; d >= 0; d--) sum = sums[d] + sum * (FT_SCALED ? 1.0f / 2048.0f : 1.0f / 256.0f);
    return sum;
}

/* The power of two, as an exponent, that a vector with this largest magnitude counts from. Tiny ones need no more. */
FT_DEVICE int ft_exponent(float top) {
    const int exponent = (int)(ft_bits(top) >> 23) - 127;
    return exponent < -112 + FT_TOP ? -112 + FT_TOP : exponent > 127 ? 127 : exponent;
}

FT_DEVICE float ft_power(int exponent) { return ft_float((unsigned int)(exponent + 127) << 23); }

/* x * 2^exponent, where that may be no power that fp32 has. */
FT_DEVICE float ft_times_power(float x, int exponent) {
    const int half = exponent / 2;
    return x * ft_power(half) * ft_power(exponent - half);
}

FT_DEVICE float ft_activate(float gate, float up, float alpha, float limit) {
    if (FT_ACTIVATION == 0) return gate / (1.0f + expf(-gate)) * up;
    gate = gate > limit ? limit : gate; /* so written that NaN stays */
    up = up > limit ? limit : up < -limit ? -limit : up;
    if (FT_ACTIVATION == 1) return gate / (1.0f + expf(-gate)) * up;
    return gate / (1.0f + expf(-alpha * gate)) * (up + 1.0f);
}

struct ft_globals {
    float first, second;
    int mode; /* 0 none, 1 multiply, 2 divide */
};

FT_DEVICE float ft_scale_all(float x, float factor, int mode) {
    return mode == 0 ? x : mode == 1 ? x * factor : x / factor;
}

/* Weights of a row, with those that fill its last unit. */
template <int K> struct ft_padded {
    enum { UNITS = (K + FT_UNIT_K - 1) / FT_UNIT_K, WIDTH = UNITS * FT_UNIT_K, BYTES = 2 * WIDTH };
};

/* A warp's part of the product: a run of units of TILES tiles of BYTES each, rows of K weights, by stages, of which a ring
   holds DEPTH. */
template <int TILES, int K, int BYTES, int DEPTH> struct ft_stages {
    enum {
        UNITS = ft_padded<K>::UNITS,
        SLOT = TILES * FT_STAGE,
        RING = DEPTH * SLOT,
        RAGGED = BYTES % FT_UNIT != 0
    };

    const unsigned char *tiles, *ring; /* the tiles that are copied next */
    ft_address slots, barriers;
    int warp, lane;
    int first, end;    /* this warp's units */
    int next, slot;    /* the unit that is copied next, and to where in the ring */
    int n_tiles;       /* from there on to the last one of this block */
    int full;          /* the slot that is multiplied next */
    unsigned int turn; /* how often that was full before, its last bit */

    /* Once in a kernel. What a ragged end leaves as it was is multiplied with zeros, and must be numbers. */
    template <bool ALL> __device__ void open(unsigned char *to, unsigned long long *all_barriers) {
        warp = ft_uniform(threadIdx.x / 32);
        lane = threadIdx.x % 32;
        first = warp * UNITS / FT_WARPS;
        end = (warp + 1) * UNITS / FT_WARPS;
        ring = to + warp * RING;
        slots = ft_address_of(ring);
        barriers = ft_address_of(all_barriers + warp * DEPTH);
        slot = full = 0;
        turn = 0;
        if (RAGGED || !ALL)
            for (int i = 16 * lane; i < RING; i += 512) *(uint4 *)(to + warp * RING + i) = make_uint4(0, 0, 0, 0);
        if (lane < DEPTH) ft_open_slot(barriers + 8 * lane);
        ft_opened();
    }

    /* Begin with n tiles, from the first on: start to copy all stages but one that the ring holds. */
    template <bool ALL> __device__ void start(const unsigned char *first_tile, int n) {
        tiles = first_tile;
        next = first;
        n_tiles = first < end ? n : 0;
#pragma unroll
        for (int i = 0; i < DEPTH - 1; i++) copy<ALL>();
    }

    /* Start to copy the next stage, if there is one. */
    template <bool ALL> __device__ void copy() {
        if (n_tiles > 0) {
            const int stop = next + FT_UNITS < end ? next + FT_UNITS : end;
            const int to = RAGGED && stop == UNITS ? BYTES : stop * FT_UNIT;
            ft_fill_slot<TILES>(slots + SLOT * slot, FT_STAGE, tiles + next * FT_UNIT, BYTES, to - next * FT_UNIT,
                                ALL || n_tiles >= TILES ? TILES : n_tiles, barriers + 8 * slot, lane);
            slot = slot == DEPTH - 1 ? 0 : slot + 1;
            next = stop;
            if (stop == end) {
                tiles += TILES * BYTES;
                n_tiles -= TILES;
                next = first;
            }
        }
        ft_end_slot();
    }

    /* Until the next stage is there; returns it. Its slot is copied to again after the next `copy`. */
    __device__ const unsigned char *take() {
        ft_wait_slot<DEPTH - 2>(barriers + 8 * full, turn);
        const unsigned char *stage = ring + SLOT * full;
        turn ^= full == DEPTH - 1;
        full = full == DEPTH - 1 ? 0 : full + 1;
        return stage;
    }

    /* Take what was begun first of all, so that nothing is written to a block that has ended. */
    template <bool ALL> __device__ void finish() {
        const int begun = slot;
        n_tiles = 0;
        while (full < begun) {
            take();
            copy<ALL>();
        }
    }

    /* Multiply this warp's units of the next TILES tiles with so many vectors, or with ONE, for which less is computed.
       DEPTH - 1 stages are on their way always. */
    template <bool ALL, bool ONE> __device__ void multiply(const unsigned char *vectors, int n_vectors, float (*sum)[4]) {
        const int g = lane / 4, t = lane % 4, stride = ONE ? 64 : 64 * n_vectors;
        const int codes = ft_codes_at(g, t), scales = ft_scales_at(g, t);
        const unsigned char *vector = vectors + 64 * (g < n_vectors ? g : 0) + 16 * t + first * FT_PIECES * stride;
        for (int at = first; at < end; at += FT_UNITS) {
            const unsigned char *unit = take();
            __syncwarp(); /* all lanes are done with the slot that is copied to next */
            copy<ALL>();
#pragma unroll 2
            for (int left = end - at < FT_UNITS ? end - at : FT_UNITS; left > 0; left--) {
#pragma unroll
                for (int piece = 0; piece < FT_PIECES; piece++) {
                    const uint4 x = *(const uint4 *)vector;
                    vector += stride;
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++)
                        ft_piece<ONE>(ft_tile{unit + tile * FT_STAGE + codes, unit + tile * FT_STAGE + scales}, piece,
                                      x, sum[tile]);
                }
                unit += FT_UNIT;
            }
        }
    }
};

/* A row of x, which becomes vectors by THREADS threads that wait for each other. */
template <typename X, int K, int THREADS> struct ft_row {
    enum { WIDTH = ft_padded<K>::WIDTH, ROUNDS = (WIDTH + 8 * THREADS - 1) / (8 * THREADS) };
    ft_eight<X> items[ROUNDS];

    /* Ask for it. */
    __device__ void ask(const X *row) {
        const bool aligned = ((unsigned long long)row & 15) == 0;
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) ft_load<X, K>(row, 8 * (THREADS * r + threadIdx.x), aligned, items[r]);
    }

    /* Its vectors; returns the exponent of their power of two. stride: from piece to piece. digit: from digit to digit.
       tops: a word for each warp. */
    __device__ int place(unsigned char *to, int stride, int digit, float *tops) {
        int exponent = 0;
        float factor = 1.0f;
        if (FT_SCALED) {
            float top = 0.0f;
#pragma unroll
            for (int r = 0; r < ROUNDS; r++) {
                float v[8];
                ft_values<X, K>(items[r], 8 * (THREADS * r + threadIdx.x), v);
#pragma unroll
                for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(v[i]));
            }
#pragma unroll
            for (int lanes = 16; lanes > 0; lanes /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
            if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
            __syncthreads();
#pragma unroll
            for (int w = 0; w < THREADS / 32; w++) top = fmaxf(top, tops[w]);
            exponent = ft_exponent(top) - FT_TOP;
            factor = ft_power(-exponent);
        }
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            const int k = 8 * (THREADS * r + threadIdx.x);
            if (k >= WIDTH) break;
            float v[8];
            ft_values<X, K>(items[r], k, v);
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] *= factor;
            ft_place_digits(to, stride, digit, k, v);
        }
        return exponent - FT_WEIGHTS;
    }
};

/* One row of x for each block: its vectors, and behind the vectors of all rows their exponents. */
template <typename X, int K> FT_DEVICE void ft_prepare_rows(const X *x, unsigned char *prepared) {
    enum { BYTES = ft_padded<K>::BYTES };
    __shared__ float tops[FT_LANES / 32];
    ft_row<X, K, FT_LANES> row;
    row.ask(x + (long long)blockIdx.x * K);
    const int exponent = row.place(prepared + (long long)blockIdx.x * (FT_DIGITS * BYTES), 64, BYTES, tops);
    if (threadIdx.x == 0) ((int *)(prepared + (long long)gridDim.x * (FT_DIGITS * BYTES)))[blockIdx.x] = exponent;
}

/* Vectors that were prepared of n rows go to shared memory, and their exponents. */
template <int K>
FT_DEVICE void ft_fetch(const unsigned char *prepared, int n_rows, const int *rows, int n, unsigned char *to,
                        int *exponents) {
    enum { BYTES = ft_padded<K>::BYTES, ROUNDS = (BYTES / 16 + FT_THREADS - 1) / FT_THREADS };
    if (threadIdx.x < n)
        exponents[threadIdx.x] = ((const int *)(prepared + (long long)n_rows * (FT_DIGITS * BYTES)))[rows[threadIdx.x]];
    for (int c = 0; c < n * FT_DIGITS; c++) {
        const unsigned char *from = prepared + ((long long)rows[c / FT_DIGITS] * FT_DIGITS + c % FT_DIGITS) * BYTES;
        uint4 read[ROUNDS];
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            const int i = FT_THREADS * r + threadIdx.x;
            if (i < BYTES / 16) read[r] = *(const uint4 *)(from + 16 * i);
        }
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            const int i = FT_THREADS * r + threadIdx.x;
            if (i < BYTES / 16) *(uint4 *)(to + i / 4 * (64 * FT_DIGITS * n) + 64 * c + i % 4 * 16) = read[r];
        }
    }
}

/* A block's share of the work: a part of a unit; a unit of -1 is none. */
struct ft_share {
    int unit;
    long long address;
    unsigned int part, parts;
};

/* Share out `blocks` blocks, with which the device is busy, among the units that are there, each into at most so many parts.
   Blocks beyond have none: so all that work can begin at once. */
FT_DEVICE ft_share ft_find_share(const long long *address, int n_units, int blocks, int most) {
    const int lane = threadIdx.x % 32;
    const long long early = lane < n_units ? address[lane] : 0; /* mostly all of them */
    unsigned int count = __popc(__ballot_sync(~0u, early != 0));
#pragma unroll 1
    for (int i = 32; i < n_units; i += 32)
        count += __popc(__ballot_sync(~0u, i + lane < n_units && address[i + lane] != 0));
    const unsigned int each = (unsigned int)blocks / (count ? count : 1);
    const unsigned int parts = each < 1 ? 1 : each < (unsigned int)most ? each : most;
    const unsigned int before = blockIdx.x / parts; /* units that are there, before this block's */
    int left = before;
#pragma unroll 1
    for (int i = 0; i < n_units; i += 32) {
        const long long of_lane = i == 0 ? early : i + lane < n_units ? address[i + lane] : 0;
        unsigned int there = __ballot_sync(~0u, of_lane != 0);
        const int n = __popc(there);
        if (left < n) {
#pragma unroll 1
            for (; left > 0; left--) there &= there - 1;
            const int found = __ffs(there) - 1;
            return ft_share{i + found, __shfl_sync(~0u, of_lane, found), blockIdx.x - before * parts, parts};
        }
        left -= n;
    }
    return ft_share{-1, 0, 0, parts};
}

/* A block has a run of groups of TILES tiles of one of n_units units, the longer the more units there are. x: n_rows rows of
   activations, of which route / k is a route's. prepared: what was prepared of them, or null: then each block does so for
   itself. columns: vectors that fit into shared memory, 1 with ONE. */
template <typename X, bool GATE_UP, bool ONE, int TILES, int K, int N, int BYTES, int DEPTH>
FT_DEVICE void ft_gemv(const X *x, const unsigned char *prepared, int n_rows, const long long *address, int n_units,
                       const int *route, float *out, unsigned int k, long long offset, int columns, int blocks, float alpha,
                       float limit) {
    typedef ft_stages<TILES, K, BYTES, DEPTH> stages;
    enum {
        HALVES = GATE_UP ? 2 : 1,
        ROWS = FT_ROWS * TILES / HALVES, /* of a group */
        TILES_OF_ROWS = (N + FT_ROWS - 1) / FT_ROWS,
        COUNT = HALVES * TILES_OF_ROWS,
        GROUPS = (COUNT + TILES - 1) / TILES,
        ALL = COUNT % TILES == 0
    };
    FT_SHARED(shared);
    __shared__ unsigned long long barriers[FT_WARPS * DEPTH];
    __shared__ float tops[FT_COLUMNS][FT_WARPS];
    __shared__ int rows[FT_COLUMNS], routes[FT_COLUMNS], exponents[FT_COLUMNS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    bool waited = false, asked = false;
    stages part;
    ft_row<X, K, FT_THREADS> row_of_x;
    part.template open<ALL>(shared, barriers);
    if (GATE_UP && !prepared) { /* units may come from what is before this */
        ft_wait_for_last();
        waited = true;
        asked = n_rows == 1;
        if (asked) row_of_x.ask(x); /* ahead of the weights, behind which it would wait */
    }
    ft_let_next_start(); /* down reads units at once */
    const ft_share mine = ft_find_share(address, n_units, blocks, GROUPS);
    if (mine.unit < 0) return;
    const int first = mine.part * GROUPS / mine.parts, n_groups = (mine.part + 1) * GROUPS / mine.parts - first;
    const unsigned char *record = (const unsigned char *)mine.address + offset;
    const int wanted = lane < FT_COLUMNS ? route[mine.unit * FT_COLUMNS + lane] : -1;
    const unsigned char *tiles = record + (GATE_UP ? FT_GATE_UP : FT_DOWN) + (long long)first * TILES * BYTES;
    const int n_tiles = n_groups * TILES < COUNT - first * TILES ? n_groups * TILES : COUNT - first * TILES;
    const ft_globals globals = *(const ft_globals *)(record + (GATE_UP ? FT_GATE_UP_GLOBALS : FT_DOWN_GLOBALS));
    float *sums = (float *)(shared + FT_WARPS * stages::RING); /* [warp][tile][row][column] */
    unsigned char *vectors = (unsigned char *)(sums + FT_WARPS * TILES * FT_ROWS * FT_COLUMNS);
    part.template start<ALL>(tiles, n_tiles);
    unsigned int left = __ballot_sync(~0u, wanted >= 0);
    if (!left) part.template finish<ALL>();
    while (left) {
        int n = 0; /* routes of this pass */
        for (; left && n < columns / FT_DIGITS; n++, left &= left - 1) {
            const int next = __shfl_sync(~0u, wanted, __ffs(left) - 1);
            if (threadIdx.x == 0) {
                routes[n] = next;
                rows[n] = next / k;
            }
        }
        __syncthreads();
        if (!waited) ft_wait_for_last();
        waited = true;
        if (prepared)
            ft_fetch<K>(prepared, n_rows, rows, n, vectors, exponents);
        else
            for (int c = 0; c < n; c++) {
                if (!asked) row_of_x.ask(x + (long long)rows[c] * K);
                const int exponent = row_of_x.place(vectors + 64 * FT_DIGITS * c, 64 * FT_DIGITS * n, 64, tops[c]);
                if (threadIdx.x == 0) exponents[c] = exponent;
            }
        __syncthreads();
        for (int group = first; group < first + n_groups; group++) {
            const int row = threadIdx.x % ROWS, at = group * ROWS + row;
            float bias[2] = {0.0f, 0.0f}; /* asked for long before it is used */
            if (FT_HAS_BIAS && at < N)
#pragma unroll
                for (int half = 0; half < HALVES; half++)
                    bias[half] = ((const float *)(record + (GATE_UP ? FT_GATE_UP_BIAS : FT_DOWN_BIAS)))
                        [half * TILES_OF_ROWS * FT_ROWS + at];
            float sum[TILES][4];
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) sum[tile][0] = sum[tile][1] = sum[tile][2] = sum[tile][3] = 0.0f;
            part.template multiply<ALL, ONE>(vectors, n * FT_DIGITS, sum);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                float *to = sums + ((warp * TILES + tile) * FT_ROWS + lane / 4 * 2) * FT_COLUMNS + lane % 4 * 2;
                *(float2 *)to = make_float2(sum[tile][0], sum[tile][1]);
                *(float2 *)(to + FT_COLUMNS) = make_float2(sum[tile][2], sum[tile][3]);
            }
            __syncthreads();
            for (int column = threadIdx.x / ROWS; column < n && at < N; column += (FT_THREADS + ROWS - 1) / ROWS) {
                float value[2] = {0.0f, 0.0f};
#pragma unroll
                for (int half = 0; half < HALVES; half++) {
                    float digits[FT_DIGITS];
#pragma unroll
                    for (int d = 0; d < FT_DIGITS; d++) {
                        const float *from = sums + (half * FT_ROWS + row) * FT_COLUMNS + column * FT_DIGITS + d;
                        digits[d] = from[0];
#pragma unroll
                        for (int w = 1; w < FT_WARPS; w++) digits[d] += from[w * TILES * FT_ROWS * FT_COLUMNS];
                    }
                    float whole = ft_join_digits(digits);
                    if (FT_SCALED) whole = ft_times_power(whole, exponents[column]);
                    value[half] = ft_scale_all(whole, half ? globals.second : globals.first, globals.mode) + bias[half];
                }
                out[(long long)routes[column] * N + at] =
                    GATE_UP ? ft_activate(value[0], value[1], alpha, limit) : value[0];
            }
            __syncthreads();
        }
        if (left) part.template start<ALL>(tiles, n_tiles);
    }
}

extern "C" __global__ void __launch_bounds__(FT_LANES) prepare_x(const FT_X *x, unsigned char *prepared) {
    ft_wait_for_last(); /* gate_up reads units and records at once: they may come from what is before this */
    ft_let_next_start();
    ft_prepare_rows<FT_X, FT_HIDDEN>(x, prepared);
}

extern "C" __global__ void __launch_bounds__(FT_LANES) prepare_h(const float *h, unsigned char *prepared) {
    ft_let_next_start();
    ft_wait_for_last();
    ft_prepare_rows<float, FT_INTERMEDIATE>(h, prepared);
}

/* For any number of vectors, and for one at a time. */
#define FT_GATE_UP_KERNEL(name, one)                                                                                  \
    extern "C" __global__ void __launch_bounds__(FT_THREADS, FT_RESIDENT)                                             \
    name(const FT_X *x, const unsigned char *prepared, int n_rows, const long long *address, int n_units,             \
         const int *route, float *out, unsigned int k, long long offset, int columns, int blocks, float alpha,        \
         float limit) {                                                                                               \
        ft_gemv<FT_X, true, one, 2, FT_HIDDEN, FT_INTERMEDIATE, FT_HIDDEN_TILE, FT_DEPTH>(                            \
            x, prepared, n_rows, address, n_units, route, out, k, offset, columns, blocks, alpha, limit);             \
    }
FT_GATE_UP_KERNEL(gate_up, false)
FT_GATE_UP_KERNEL(gate_up_one, FT_DIGITS == 1)

#define FT_DOWN_KERNEL(name, one)                                                                                     \
    extern "C" __global__ void __launch_bounds__(FT_THREADS, FT_RESIDENT)                                             \
    name(const float *h, const unsigned char *prepared, int n_rows, const long long *address, int n_units,            \
         const int *route, float *out, long long offset, int columns, int blocks) {                                   \
        ft_gemv<float, false, one, FT_TILES, FT_INTERMEDIATE, FT_HIDDEN, FT_INTERMEDIATE_TILE, FT_DOWN_DEPTH>(        \
            h, prepared, n_rows, address, n_units, route, out, 1, offset, columns, blocks, 0.0f, 0.0f);               \
    }
FT_DOWN_KERNEL(down, false)
FT_DOWN_KERNEL(down_one, FT_DIGITS == 1)
