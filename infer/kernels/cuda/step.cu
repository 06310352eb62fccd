// What a decode step takes from the host's memory, and leaves there.
#include "bits.cuh"

// One block; `from` is pinned host memory, written before the launch.
extern "C" __global__ void take(const volatile u64* from, u64* to, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}

// `to` is pinned host memory. Whoever sees what a later kernel of the stream writes behind a
// __threadfence_system sees this too.
extern "C" __global__ void give(const u64* from, volatile u64* to, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = from[i];
}

// Rows that the host has computed: sources [rows] says where they lie in its pinned memory, 0 where
// a row of `to` [rows, columns] stays as it is. Grid (blocks over the columns, rows).
extern "C" __global__ void take_rows(const u64* sources, float* to, int columns) {
    const volatile float* from = (const volatile float*)sources[blockIdx.y];
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (from && column < columns) to[(u64)blockIdx.y * columns + column] = from[column];
}
