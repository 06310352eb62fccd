// x W^T for one matrix of a float FORMAT with few rows, such as a router's: a block for each row.
#include "dot.cuh"

#define THREADS 128

extern "C" __global__ void __launch_bounds__(THREADS)
    linear_float(const u8* matrix, float* output, const Inputs x, int token_count) {
    __shared__ float parts[THREADS / 32][TOKENS];
    const u8* row = matrix + (u64)blockIdx.x * x.columns * FORMAT::BLOCK_BYTES;
    float sums[TOKENS] = {};
#pragma unroll 8
    for (int i = threadIdx.x; i < x.columns; i += THREADS) {
        const float w = FORMAT::value(row, i);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const int token = min(t, token_count - 1);
            sums[t] = fmaf(w, x.values[(u64)token * x.columns + i], sums[t]);
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        float sum = half_warp_sum(sums[t]);
        sum += __shfl_xor_sync(~0u, sum, 16);
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][t] = sum;
    }
    __syncthreads();
    const int t = threadIdx.x;
    if (t < TOKENS && t < token_count) {
        float sum = parts[0][t];
        for (int warp = 1; warp < THREADS / 32; ++warp) sum += parts[warp][t];
        output[(u64)t * gridDim.x + blockIdx.x] = sum;
    }
}
