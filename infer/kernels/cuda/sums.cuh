// Sums over a block.
#pragma once

// In a fixed order; every thread gets the result.
__device__ inline float block_sum(float value) {
    __shared__ float parts[32];
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0;
    for (int warp = 0; warp < (int)blockDim.x / 32; ++warp) total += parts[warp];
    return total;
}
