/* What handoff.cu asks of the hardware beside driver.RING; tests/support/cuda_twin.h has the same in plain C++. */
#define FT_DEVICE static __device__ __forceinline__

/* Nanoseconds since some moment, for all multiprocessors alike. */
FT_DEVICE long long ft_now() {
    long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

/* What the host has written, from no cache. */
FT_DEVICE long long ft_load_number(const long long *from) {
    long long value;
    asm volatile("ld.relaxed.sys.s64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}
FT_DEVICE uint4 ft_load_sixteen(const void *from) {
    uint4 value;
    asm volatile("ld.volatile.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(from) : "memory");
    return value;
}
FT_DEVICE unsigned int ft_load_word(const unsigned int *from) {
    unsigned int value;
    asm volatile("ld.volatile.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
FT_DEVICE unsigned int ft_load_half(const unsigned short *from) {
    unsigned short value;
    asm volatile("ld.volatile.u16 %0, [%1];" : "=h"(value) : "l"(from) : "memory");
    return value;
}

FT_DEVICE float ft_float(unsigned int bits) { return __uint_as_float(bits); }
FT_DEVICE unsigned int ft_bits(float value) { return __float_as_uint(value); }
/* Nearest, ties to even; sm_80 has an instruction, older ones have not. */
FT_DEVICE unsigned int ft_to_bf16(float value) {
    const unsigned int bits = ft_bits(value);
    return value != value ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
