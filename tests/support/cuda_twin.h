/* A GPU in plain C++ in place of gpu/device.cuh, device/handoff.cuh and driver.RING: blocks one after the other, a block's
 * threads as fibers that go on until they meet at a barrier. Copies to shared memory by even lanes happen when they are
 * waited for and not before, those by odd lanes at once; shared memory holds 0xff bytes at first.
 */
#ifndef FREETOKEN_CUDA_TWIN_H
#define FREETOKEN_CUDA_TWIN_H
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucontext.h>

#include <deque>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define FT_DEVICE static inline
#define FT_SHARED(name) unsigned char *name = ft_shared.data() + (-(uintptr_t)ft_shared.data() & 15)

struct uint2 { unsigned int x, y; };
struct uint4 { unsigned int x, y, z, w; };
struct float2 { float x, y; };
static inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }
static inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }

struct ft_run { unsigned char *to; const void *from; };
struct ft_fiber {
    ucontext_t context;
    std::vector<char> stack;
    std::vector<ft_run> open;
    std::deque<std::vector<ft_run>> groups;
    int turn; /* of what its warp exchanges */
    bool done;
};
struct ft_barrier { int arrived, passed; };
struct ft_dim { unsigned int x, y; };

static ft_dim threadIdx, blockIdx, gridDim;
static std::vector<unsigned char> ft_shared;
static std::vector<ft_fiber> ft_fibers;
static std::vector<ft_barrier> ft_warps;
static std::vector<char> ft_exchanged[2]; /* 64 bytes for each thread */
static ft_barrier ft_block;
static ucontext_t ft_home;
static std::function<void()> ft_body;

static inline ft_fiber &ft_me() { return ft_fibers[threadIdx.x]; }

static inline void ft_yield() {
    const unsigned int me = threadIdx.x;
    swapcontext(&ft_fibers[me].context, &ft_home);
    threadIdx.x = me;
}

static inline void ft_meet(ft_barrier &barrier, int all) {
    const int passed = barrier.passed;
    if (++barrier.arrived == all) {
        barrier.arrived = 0;
        barrier.passed++;
    } else {
        while (barrier.passed == passed) ft_yield();
    }
}

static inline void __syncthreads() { ft_meet(ft_block, (int)ft_fibers.size()); }
static inline void __syncwarp() { ft_meet(ft_warps[threadIdx.x / 32], 32); }

/* What all lanes of the warp have given. */
template <typename T> static const char *ft_exchange(const T &given) {
    std::vector<char> &buffer = ft_exchanged[ft_me().turn++ % 2];
    memcpy(&buffer[64 * threadIdx.x], &given, sizeof given);
    __syncwarp();
    return &buffer[64 * (threadIdx.x / 32 * 32)];
}
template <typename T> static T ft_of_lane(const char *all, int lane) {
    T given;
    memcpy(&given, all + 64 * (lane & 31), sizeof given);
    return given;
}

template <typename T> static inline T __shfl_sync(unsigned int, T value, int lane) {
    return ft_of_lane<T>(ft_exchange(value), lane);
}
template <typename T> static inline T __shfl_xor_sync(unsigned int, T value, int lanes) {
    return ft_of_lane<T>(ft_exchange(value), (int)threadIdx.x % 32 ^ lanes);
}
static inline unsigned int __ballot_sync(unsigned int, bool vote) {
    const char *all = ft_exchange(vote);
    unsigned int votes = 0;
    for (int lane = 0; lane < 32; lane++) votes |= (unsigned int)ft_of_lane<bool>(all, lane) << lane;
    return votes;
}
static inline int __popc(unsigned int bits) { return __builtin_popcount(bits); }
static inline int __ffs(unsigned int bits) { return __builtin_ffs((int)bits); }

typedef unsigned char *ft_address;
static inline ft_address ft_address_of(const void *shared) { return (ft_address)shared; }
static inline void ft_open_slot(ft_address) {}
static inline void ft_opened() {}
static inline int ft_uniform(int value) { return __shfl_sync(~0u, value, 0); }
static inline void ft_copy(const ft_run &run) {
    if ((uintptr_t)run.to % 16 || (uintptr_t)run.from % 16) abort();
    memcpy(run.to, run.from, 16);
}
template <int COUNT>
static inline void ft_fill_slot(ft_address to, int room, const unsigned char *from, int step, int bytes, int n, ft_address,
                                int lane) {
    if (n > COUNT) abort();
    for (int i = 0; i < n; i++)
        for (int at = 16 * lane; at < bytes; at += 512) {
            const ft_run run = {to + i * room + at, from + i * step + at};
            if (lane % 2)
                ft_copy(run);
            else
                ft_me().open.push_back(run);
        }
}
static inline void ft_end_slot() {
    ft_me().groups.push_back(std::move(ft_me().open));
    ft_me().open.clear();
}
template <int N> static inline void ft_wait_slot(ft_address, unsigned int) {
    for (; ft_me().groups.size() > N; ft_me().groups.pop_front())
        for (const ft_run &run : ft_me().groups.front()) ft_copy(run);
    __syncwarp();
}
static inline void ft_let_next_start() {}
static inline void ft_wait_for_last() {}

static inline float ft_float(unsigned int bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline unsigned int ft_bits(float value) {
    unsigned int bits;
    memcpy(&bits, &value, 4);
    return bits;
}
static inline unsigned int ft_choose(unsigned int mask, unsigned int a, unsigned int b) {
    return (a & mask) | (b & ~mask);
}
static inline unsigned int ft_max(unsigned int a, unsigned int b) { return a > b ? a : b; }
static inline unsigned int ft_bytes(unsigned int low, unsigned int high, unsigned int selector) {
    const uint64_t both = (uint64_t)high << 32 | low;
    unsigned int out = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned int which = selector >> 4 * i & 15;
        if (which > 7) abort();
        out |= (unsigned int)(both >> 8 * which & 255) << 8 * i;
    }
    return out;
}

static inline float ft_from_f16(unsigned int bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double size = exponent == 31 ? (mantissa ? (double)NAN : (double)INFINITY)
                        : exponent     ? ldexp(1024 + mantissa, exponent - 25)
                                       : ldexp(mantissa, -24);
    return (float)(bits & 0x8000 ? -size : size);
}
/* Nearest, ties to even. */
static inline unsigned int ft_to_f16(double value) {
    const unsigned int sign = signbit(value) ? 0x8000u : 0;
    if (isnan(value)) return 0x7FFF;
    const double size = fabs(value);
    if (size == 0 || size >= 65520) return size == 0 ? sign : sign | 0x7C00;
    int exponent;
    frexp(size, &exponent);
    const int step = exponent - 11 < -24 ? -24 : exponent - 11; /* log2 of the last bit */
    const unsigned int whole = (unsigned int)nearbyint(ldexp(size, -step));
    return sign | (step == -24 ? whole : ((unsigned int)(step + 24) << 10) + whole);
}
static inline unsigned int ft_to_bf16(float value) {
    const unsigned int bits = ft_bits(value);
    return isnan(value) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static inline unsigned int ft_to_f16x2(float low, float high) { return ft_to_f16(low) | ft_to_f16(high) << 16; }
static inline unsigned int ft_to_bf16x2(float low, float high) { return ft_to_bf16(low) | ft_to_bf16(high) << 16; }
static inline unsigned int ft_fma_f16x2(unsigned int a, unsigned int b, unsigned int c) {
    unsigned int halves[2];
    for (int i = 0; i < 2; i++)
        halves[i] = ft_to_f16((double)ft_from_f16(a >> 16 * i) * ft_from_f16(b >> 16 * i) + ft_from_f16(c >> 16 * i));
    return halves[0] | halves[1] << 16;
}
static inline unsigned int ft_mul_f16x2(unsigned int a, unsigned int b) { return ft_fma_f16x2(a, b, 0x80008000u); }

static inline void ft_set(unsigned int *answer, unsigned int value) { __atomic_store_n(answer, value, __ATOMIC_RELEASE); }
static inline void ft_ring(unsigned int *bell, unsigned int answered) { ft_set(bell, (*bell & ~1u) + 2u + answered); }
static inline long long ft_now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}
static inline long long ft_load_number(const long long *from) { return *from; }
static inline uint4 ft_load_sixteen(const void *from) {
    if ((uintptr_t)from % 16) abort();
    return *(const uint4 *)from;
}
static inline unsigned int ft_load_word(const unsigned int *from) { return *from; }
static inline unsigned int ft_load_half(const unsigned short *from) { return *from; }

struct ft_operands { unsigned int a[4], b[2]; };

template <typename Widen>
static void ft_mma(float *sum, const ft_operands &mine, Widen widen) {
    const char *all = ft_exchange(mine);
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    for (int i = 0; i < 4; i++) {
        const int column = 2 * t + i % 2;
        double total = sum[i];
        for (int k = 0; k < 16; k++) {
            const ft_operands a = ft_of_lane<ft_operands>(all, 4 * g + k % 8 / 2);
            const ft_operands b = ft_of_lane<ft_operands>(all, 4 * column + k % 8 / 2);
            total += (double)widen(a.a[i / 2 + k / 8 * 2] >> 16 * (k % 2)) * widen(b.b[k / 8] >> 16 * (k % 2));
        }
        sum[i] = (float)total;
    }
}
static inline void ft_mma_f16(float *sum, unsigned int a0, unsigned int a1, unsigned int a2, unsigned int a3,
                              unsigned int b0, unsigned int b1) {
    ft_mma(sum, {{a0, a1, a2, a3}, {b0, b1}}, [](unsigned int bits) { return ft_from_f16(bits & 0xFFFF); });
}
static inline void ft_mma_bf16(float *sum, unsigned int a0, unsigned int a1, unsigned int a2, unsigned int a3,
                               unsigned int b0, unsigned int b1) {
    ft_mma(sum, {{a0, a1, a2, a3}, {b0, b1}}, [](unsigned int bits) { return ft_float(bits << 16); });
}

static void ft_enter() {
    ft_body();
    for (const auto &group : ft_me().groups)
        if (!group.empty()) abort(); /* would be written to a block that has ended */
    ft_me().done = true;
    ft_yield();
}

/* A block's threads, in turn until all have ended. */
static void ft_run_block(int threads, int shared) {
    ft_shared.assign((size_t)shared + 16, 0xFF);
    ft_fibers.resize((size_t)threads);
    ft_warps.assign((size_t)threads / 32, {0, 0});
    ft_block = {0, 0};
    for (auto &buffer : ft_exchanged) buffer.resize(64 * (size_t)threads);
    for (ft_fiber &fiber : ft_fibers) {
        fiber.stack.resize(64 << 10);
        fiber.open.clear();
        fiber.groups.clear();
        fiber.turn = 0;
        fiber.done = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = NULL;
        makecontext(&fiber.context, ft_enter, 0);
    }
    for (int left = threads; left > 0;) {
        left = 0;
        for (int i = 0; i < threads; i++) {
            if (ft_fibers[(size_t)i].done) continue;
            left++;
            threadIdx.x = (unsigned int)i;
            swapcontext(&ft_home, &ft_fibers[(size_t)i].context);
        }
    }
}

/* Launch a kernel whose arguments lie at these addresses. */
template <typename... A> static void ft_launch(void (*kernel)(A...), void **at, const int *grid, int threads, int shared) {
    [&]<size_t... I>(std::index_sequence<I...>) {
        std::tuple<A...> arguments(*(A *)at[I]...);
        ft_body = [kernel, arguments] { std::apply(kernel, arguments); };
    }(std::index_sequence_for<A...>());
    gridDim = {(unsigned int)grid[0], (unsigned int)grid[1]};
    for (blockIdx.y = 0; (int)blockIdx.y < grid[1]; blockIdx.y++)
        for (blockIdx.x = 0; (int)blockIdx.x < grid[0]; blockIdx.x++) ft_run_block(threads, shared);
}
#endif
