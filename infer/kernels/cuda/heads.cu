// What lies between the projections and attention, in one launch: norms of queries and keys, their
// rotation, and keys and values into the cache.
#include "bits.cuh"

#define MOST_DIMS 512

struct Cache {
    void* keys;  // [context, kv_heads, head_dim]
    void* values;
    int kind;  // 0 float32, 1 float16, 2 bfloat16
};

struct Rotation {
    const float* cosines;  // [positions, half]
    const float* sines;
    int half;
};

__device__ inline void store(void* to, int kind, u64 at, float value) {
    if (kind == 0) {
        ((float*)to)[at] = value;
    } else if (kind == 1) {
        u16 bits;
        asm("{ .reg .f16 h; cvt.rn.f16.f32 h, %1; mov.b16 %0, h; }" : "=h"(bits) : "f"(value));
        ((u16*)to)[at] = bits;
    } else {
        const u32 bits = __float_as_uint(value);
        const bool number = (bits & 0x7fffffff) <= 0x7f800000;
        ((u16*)to)[at] = number ? (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : 0x7fff;
    }
}

// One warp normalises a head and rotates it; result(i, value) takes dimension i.
template <class Result>
__device__ inline void norm_and_rotate(const float* head, const float* weight, float eps, int dims,
                                       const Rotation& rotation, u64 position, Result result) {
    __shared__ float normed[MOST_DIMS];
    const int lane = threadIdx.x;
    float squares = 0;
    for (int i = lane; i < dims; i += 32) squares = fmaf(head[i], head[i], squares);
    for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
    const float factor =
        __fdiv_rn(1.0f, __fsqrt_rn(__fdiv_rn(squares, (float)dims) + eps));
    for (int i = lane; i < dims; i += 32) normed[i] = head[i] * factor * weight[i];
    __syncwarp();
    const int half = rotation.half;
    for (int i = lane; i < half; i += 32) {
        const float c = rotation.cosines[position * half + i];
        const float s = rotation.sines[position * half + i];
        const float first = normed[i], second = normed[half + i];
        result(i, first * c - second * s);
        result(half + i, second * c + first * s);
    }
    for (int i = 2 * half + lane; i < dims; i += 32) result(i, normed[i]);
}

// q [n, heads, dims] in place, k, v [n, kv_heads, dims]; grid (heads + 2 * kv_heads, n), a warp. The
// first row's position is start_at[0] if given, else start.
extern "C" __global__ void prepare_heads(float* q, const float* k, const float* v,
                                         const float* q_weight, const float* k_weight, float eps,
                                         const Rotation rotation, const Cache cache,
                                         const int* start_at, int start, int heads, int kv_heads,
                                         int dims) {
    const u64 position = (start_at ? *start_at : start) + blockIdx.y;
    int head = blockIdx.x;
    if (head < heads) {
        float* row = q + ((u64)blockIdx.y * heads + head) * dims;
        norm_and_rotate(row, q_weight, eps, dims, rotation, position,
                        [&](int i, float value) { row[i] = value; });
        return;
    }
    head -= heads;
    const bool is_key = head < kv_heads;
    if (!is_key) head -= kv_heads;
    const u64 from = ((u64)blockIdx.y * kv_heads + head) * dims;
    const u64 to = (position * kv_heads + head) * dims;
    if (is_key) {
        norm_and_rotate(k + from, k_weight, eps, dims, rotation, position,
                        [&](int i, float value) { store(cache.keys, cache.kind, to + i, value); });
    } else {
        for (int i = threadIdx.x; i < dims; i += 32)
            store(cache.values, cache.kind, to + i, v[from + i]);
    }
}
