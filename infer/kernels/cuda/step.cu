// What a decode step takes from the host's memory.
#include "bits.cuh"

// One block; `from` is pinned host memory, written before the launch.
extern "C" __global__ void take(const volatile u64* from, u64* to, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}
