// Activations as the products read them.
//
// A quantised row is made of pieces of 32 values, x_j = scale * code_j with codes of -127..127. The
// pieces of 16 lanes lie side by side, so that the 16-byte loads of a half warp are contiguous:
//     codes: [group of 16 pieces][half][lane][16 bytes], 512 bytes a group
//     marks: [piece] scale and, in 16 bits each, the sums of the codes of the two halves
#pragma once
#include "bits.cuh"

struct Mark {
    float scale;
    u32 sums;
};

struct Inputs {
    const float* values;  // [rows, columns]
    const uint4* codes;   // [rows, groups * 32]
    const Mark* marks;    // [rows, groups * 16]
    int columns;
    int groups;  // of 16 pieces, the last one possibly in part
};

struct QuantisedRows {
    u8* codes;
    Mark* marks;
    int groups;
};

// The 32 lanes of a warp quantise and store one piece, a value each. Zeros give a scale of 0.
__device__ inline void store_piece(const QuantisedRows& to, int row, int piece, float value) {
    const int lane = threadIdx.x % 32;
    float largest = fabsf(value);
    for (int step = 16; step; step /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    const float inverse = largest > 0 ? __fdiv_rn(127.0f, largest) : 0.0f;
    const int code = __float2int_rn(value * inverse);
    int sum = code;
    for (int step = 8; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    const int second = __shfl_sync(~0u, sum, 16);
    const int at = ((row * to.groups + piece / 16) * 32 + lane / 16 * 16 + piece % 16) * 16;
    to.codes[at + lane % 16] = (u8)code;
    if (lane == 0) {
        Mark* mark = to.marks + row * to.groups * 16 + piece;
        mark->scale = __fdiv_rn(largest, 127.0f);
        mark->sums = (sum & 0xffff) | second << 16;
    }
}
