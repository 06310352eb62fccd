// Products of 8-bit fragments on tensor cores. In a warp, lane 4 g + i holds
//
//     a  of 16 rows by 16 or 32 columns: row g and row g + 8, columns 4 i to 4 i + 3 (and 16 more)
//     b  of 8 columns: column g, the same four (and four)
//     sums  rows g, g, g + 8, g + 8 by columns 2 i, 2 i + 1, 2 i, 2 i + 1
#pragma once
#include "bits.cuh"

// Sums begin at the bits of 1.5 * 2^23: as long as they stay within 22 bits, a float of the same
// bits is that number and the sum. Taking it off is exact, and faster than a conversion.
#define SUM_BITS 0x4b400000
#define SUM_BIAS 12582912.0f

// sums += a b over 16 numbers a row; a: of row g, of row g + 8.
__device__ inline void multiply16(int (&sums)[4], u32 upper, u32 lower, u32 b) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(upper), "r"(lower), "r"(b));
#else
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+r"(sums[0]), "+r"(sums[1])
        : "r"(upper), "r"(b));
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+r"(sums[2]), "+r"(sums[3])
        : "r"(lower), "r"(b));
#endif
}

// A piece of 32: the sums of its halves, or of both in dots[0] where TOGETHER.
template <bool TOGETHER>
__device__ inline void multiply_halves(float (&dots)[2][4], const u32 (&a)[4], u32 first,
                                       u32 second) {
    int sums[2][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[0][j] = sums[1][j] = SUM_BITS;
#if __CUDA_ARCH__ >= 800
    if (TOGETHER) {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+r"(sums[0][0]), "+r"(sums[0][1]), "+r"(sums[0][2]), "+r"(sums[0][3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(first), "r"(second));
    } else
#endif
    {
        multiply16(sums[0], a[0], a[1], first);
        multiply16(sums[TOGETHER ? 0 : 1], a[2], a[3], second);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        dots[0][j] = __int_as_float(sums[0][j]) - SUM_BIAS;
        dots[1][j] = __int_as_float(sums[1][j]) - SUM_BIAS;
    }
}
