#pragma once
#include "formats_float.cuh"
#include "formats_iq.cuh"
#include "formats_k.cuh"
#include "formats_simple.cuh"

// Weight j of a decoded piece: two roundings at most, as in ggml's to_float.
template <class F>
__device__ inline float weight(const Piece& piece, int j) {
    const int code = (signed char)(piece.codes[j / 4] >> 8 * (j % 4));
    const float scaled = piece.scale[j / 16] * (float)code;
    return F::OFFSET ? scaled + piece.offset[j / 16] : scaled;
}

// All threads of a block copy a format's grid; a barrier has to follow.
template <class F>
__device__ inline void load_grid(const u32* from, u32* grid) {
    for (int i = threadIdx.x; i < F::TABLE_WORDS; i += blockDim.x) grid[i] = from[i];
}
