/* What gemv.cu asks of the hardware, one instruction or two each; tests/support/cuda_twin.h has the same in plain C++.
   Compute capability 8.0 and newer. No header is included: NVRTC is given none. */
#define FT_DEVICE static __device__ __forceinline__

/* Shared memory of the size that the launch says. */
#define FT_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

typedef unsigned int ft_address; /* in shared memory */

FT_DEVICE ft_address ft_address_of(const void *shared) {
    ft_address address;
    asm("{ .reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a; }" : "=r"(address) : "l"(shared));
    return address;
}

/* What all lanes of a warp have alike, so that the compiler knows it. */
FT_DEVICE int ft_uniform(int value) { return __shfl_sync(~0u, value, 0); }

/* Runs of bytes, multiples of 16, that a warp copies to shared memory without waiting, some runs to a slot of its ring. sm_90
   has an engine for it, which counts the bytes that arrive at the slot's barrier; elsewhere each lane copies its share, and
   what was begun since the last slot is a group. */
#if __CUDA_ARCH__ >= 900
FT_DEVICE void ft_open_slot(ft_address barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
}

/* After ft_open_slot, and after ordinary stores to what will be copied to. */
FT_DEVICE void ft_opened() {
    asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
}

/* COUNT runs of so many bytes, `step` apart in memory and `room` apart in the slot; of them the first n. */
template <int COUNT>
FT_DEVICE void ft_fill_slot(ft_address to, int room, const unsigned char *from, int step, int bytes, int n,
                            ft_address barrier, int) {
    unsigned int first;
    asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(first));
    if (first) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(n * bytes) : "memory");
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (i < n)
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                             :: "r"(to + i * room), "l"(from + i * step), "r"(bytes), "r"(barrier) : "memory");
    }
}

FT_DEVICE void ft_end_slot() {}

/* Until a slot is full for the time whose last bit is `turn`; all slots but the last N were begun before it. */
template <int N> FT_DEVICE void ft_wait_slot(ft_address barrier, unsigned int turn) {
    asm volatile("{\n\t.reg .pred full;\n\t"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 full, [%0], %1;\n\t"
                 "@!full bra again;\n\t}" :: "r"(barrier), "r"(turn) : "memory");
}
#else
FT_DEVICE void ft_open_slot(ft_address) {}
FT_DEVICE void ft_opened() {}

template <int COUNT>
FT_DEVICE void ft_fill_slot(ft_address to, int room, const unsigned char *from, int step, int bytes, int n, ft_address,
                            int lane) {
    for (int i = 0; i < n; i++)
        for (int at = 16 * lane; at < bytes; at += 512)
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
                         :: "r"(to + i * room + at), "l"(from + i * step + at) : "memory");
}

FT_DEVICE void ft_end_slot() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N> FT_DEVICE void ft_wait_slot(ft_address, unsigned int) {
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
    __syncwarp();
}
#endif

/* The next kernel of the stream may start, if it was launched so as to; its ft_wait_for_last still waits for this one. */
FT_DEVICE void ft_let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Until what was before this kernel in the stream has ended. */
FT_DEVICE void ft_wait_for_last() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* sum (16, 8) += a (16, 16) b (16, 8): lane 4 g + t holds of a rows g, g + 8, g, g + 8 at columns 2 t and, in the last
   two, 2 t + 8; of b column g; of the sum row g, then row g + 8, at columns 2 t and 2 t + 1. fp16 pairs, fp32 sums. */
FT_DEVICE void ft_mma_f16(float *sum, unsigned int a0, unsigned int a1, unsigned int a2, unsigned int a3,
                          unsigned int b0, unsigned int b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* The same of bf16 pairs. */
FT_DEVICE void ft_mma_bf16(float *sum, unsigned int a0, unsigned int a1, unsigned int a2, unsigned int a3,
                           unsigned int b0, unsigned int b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* a * b + c of two fp16 each. */
FT_DEVICE unsigned int ft_fma_f16x2(unsigned int a, unsigned int b, unsigned int c) {
    unsigned int d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

FT_DEVICE unsigned int ft_mul_f16x2(unsigned int a, unsigned int b) {
    unsigned int d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

/* Two numbers rounded to fp16, the first in the lower half. */
FT_DEVICE unsigned int ft_to_f16x2(float low, float high) {
    unsigned int d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

FT_DEVICE unsigned int ft_to_bf16x2(float low, float high) {
    unsigned int d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

/* The value of an fp16 number in the lower 16 bits. */
FT_DEVICE float ft_from_f16(unsigned int bits) {
    float value;
    asm("{ .reg .f16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "h"((unsigned short)bits));
    return value;
}

/* (low, high), each byte chosen by 4 bits of the selector. */
FT_DEVICE unsigned int ft_bytes(unsigned int low, unsigned int high, unsigned int selector) {
    return __byte_perm(low, high, selector);
}

/* Bits of a where the mask has ones, else of b. */
FT_DEVICE unsigned int ft_choose(unsigned int mask, unsigned int a, unsigned int b) {
    unsigned int d;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
    return d;
}

FT_DEVICE unsigned int ft_max(unsigned int a, unsigned int b) {
    unsigned int d;
    asm("max.u32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

FT_DEVICE float ft_float(unsigned int bits) { return __uint_as_float(bits); }
FT_DEVICE unsigned int ft_bits(float value) { return __float_as_uint(value); }
