/* A trip of a captured step to the host and back (base.Trip): what the device asks, and what it does with the answer.
 *
 *     ask     one block, so that a barrier is enough before the bell, and no blocks are counted: 114 KB, which 8 tokens
 *             of 7168 bf16 are, are 14 runs of 16 bytes for each of its threads
 *     ready   the time
 *     add     rows of what came back, which are read from the host's memory once, by as many blocks as have 16 bytes
 *             for each thread: the first bytes of all are on their way together
 *
 * Kernels of trips that share histograms run one after the other.
 */

FT_DEVICE bool ft_is_aligned(const void *a, const void *b) {
    return (((unsigned long long)a | (unsigned long long)b) & 15) == 0;
}

/* By all threads of the block. */
FT_DEVICE void ft_copy(unsigned char *__restrict__ to, const unsigned char *__restrict__ from, int bytes) {
    const int whole = ft_is_aligned(to, from) ? bytes / 16 : 0;
    for (int i = (int)threadIdx.x; i < whole; i += FT_THREADS) ((uint4 *)to)[i] = ((const uint4 *)from)[i];
    for (int i = 16 * whole + (int)threadIdx.x; i < bytes; i += FT_THREADS) to[i] = from[i];
}

/* As histogram.bucket. */
FT_DEVICE int ft_bucket(long long ns) {
    int shift = 0;
    if (ns < 0) ns = 0;
    if (ns >> 36) return FT_BUCKETS - 1;
    for (; ns >= 16; ns >>= 1) shift++;
    return 8 * shift + (int)ns;
}

extern "C" __global__ void __launch_bounds__(FT_THREADS)
ask(unsigned int *bell, unsigned int *answer, const int *ids, int n, long long *times, long long *took,
    unsigned char *to0, const unsigned char *from0, int bytes0, unsigned char *to1, const unsigned char *from1, int bytes1,
    unsigned char *to2, const unsigned char *from2, int bytes2) {
    __shared__ int wanted;
    const bool first = threadIdx.x == 0;
    if (first) {
        wanted = 0;
        times[0] = ft_now();
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < n; i += FT_THREADS)
        if (ids[i] >= 0) wanted = 1;
    __syncthreads();
    if (wanted) {
        if (first) *took = 0;
        ft_copy(to0, from0, bytes0);
        ft_copy(to1, from1, bytes1);
        ft_copy(to2, from2, bytes2);
        __syncthreads(); /* the bell's release is for all that the block has written */
        if (first) ft_ring(bell, 0);
    } else if (first) {
        ft_set(answer, 1);
        ft_ring(bell, 1);
    }
}

extern "C" __global__ void ready(long long *times) { times[1] = ft_now(); }

/* Of one or two values. */
template <bool BF16> FT_DEVICE unsigned int ft_add(unsigned int a, unsigned int b) {
    if (!BF16) return ft_bits(ft_float(a) + ft_float(b));
    return ft_to_bf16(ft_float(a << 16) + ft_float(b << 16)) |
           ft_to_bf16(ft_float(a & 0xFFFF0000u) + ft_float(b & 0xFFFF0000u)) << 16;
}

/* A grid of parts of a row and rows. width: values of a row. */
template <bool BF16>
FT_DEVICE void ft_add_rows(unsigned char *out, const unsigned char *back, const int *ids, int k, int width,
                           long long *times, const long long *took, long long *waited, const int *counting) {
    __shared__ int wanted, any;
    const int row = (int)blockIdx.y, me = (int)(blockIdx.x * FT_THREADS + threadIdx.x);
    const int step = (int)gridDim.x * FT_THREADS, bytes = width * (BF16 ? 2 : 4);
    const bool counts = (blockIdx.x | blockIdx.y | threadIdx.x) == 0;
    if (threadIdx.x == 0) wanted = any = 0;
    __syncthreads();
    for (int i = (int)threadIdx.x; i < (int)gridDim.y * k; i += FT_THREADS)
        if (ids[i] >= 0) {
            any = 1;
            if (i / k == row) wanted = 1;
        }
    __syncthreads();
    long long work = 0; /* asked for now, needed last */
    if (counts && any && *counting) work = ft_load_number(took);
    if (wanted) {
        unsigned char *to = out + (long long)row * bytes;
        const unsigned char *from = back + (long long)row * bytes;
        const int whole = ft_is_aligned(to, from) ? bytes / 16 : 0;
        for (int i = me; i < whole; i += step) {
            const uint4 a = ((const uint4 *)to)[i], b = ft_load_sixteen((const uint4 *)from + i);
            ((uint4 *)to)[i] = {ft_add<BF16>(a.x, b.x), ft_add<BF16>(a.y, b.y), ft_add<BF16>(a.z, b.z),
                                ft_add<BF16>(a.w, b.w)};
        }
        for (int i = whole * (BF16 ? 8 : 4) + me; i < width; i += step) {
            if (BF16)
                ((unsigned short *)to)[i] = (unsigned short)ft_add<true>(((unsigned short *)to)[i],
                                                                         ft_load_half((const unsigned short *)from + i));
            else
                ((unsigned int *)to)[i] = ft_add<false>(((unsigned int *)to)[i], ft_load_word((const unsigned int *)from + i));
        }
    }
    if (blockIdx.x | blockIdx.y) return;
    __syncthreads();
    if (!counts) return;
    const long long now = ft_now(), asked = times[0], at = times[1];
    times[2] = now;
    if (work == 0) return; /* it was answered without work */
    waited[ft_bucket(now - at)]++;
    if (asked + work > at) waited[FT_BUCKETS + ft_bucket(now - asked - work)]++;
    waited[2 * FT_BUCKETS + ft_bucket(work)]++;
}

extern "C" __global__ void __launch_bounds__(FT_THREADS)
add_float(unsigned char *out, const unsigned char *back, const int *ids, int k, int width, long long *times,
          const long long *took, long long *waited, const int *counting) {
    ft_add_rows<false>(out, back, ids, k, width, times, took, waited, counting);
}

extern "C" __global__ void __launch_bounds__(FT_THREADS)
add_bf16(unsigned char *out, const unsigned char *back, const int *ids, int k, int width, long long *times,
         const long long *took, long long *waited, const int *counting) {
    ft_add_rows<true>(out, back, ids, k, width, times, took, waited, counting);
}
