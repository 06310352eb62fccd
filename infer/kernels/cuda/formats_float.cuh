// Weights that are plain numbers: no codes, so they are multiplied as floats in every arithmetic.
#pragma once
#include "bits.cuh"

template <int BYTES>
struct FloatFormat {
    static const bool IS_FLOAT = true;
    static const int BLOCK_WEIGHTS = 1;
    static const int BLOCK_BYTES = BYTES;
    static const int TABLE_WORDS = 0;
};

struct F32 : FloatFormat<4> {
    static __device__ float value(const u8* row, int index) { return ((const float*)row)[index]; }
};

struct F16 : FloatFormat<2> {
    static __device__ float value(const u8* row, int index) { return load_half(row + 2 * index); }
};

struct BF16 : FloatFormat<2> {
    static __device__ float value(const u8* row, int index) {
        return __uint_as_float(load16(row + 2 * index) << 16);
    }
};
