// Attention in float32 arithmetic, for caches of any type.
//
// Compiled for HEAD_DIM (a multiple of 32), GROUP (query heads of one key head that a block takes, a
// power of two up to 8) and KV_BYTES, KV_BF16. A block's warps take tiles of TILE keys in turn. A
// lane holds HEAD_DIM / 32 dimensions.
#include "attention.cuh"

#define DIMS (HEAD_DIM / 32)
#define TILE (GROUP == 8 ? 4 : 8)
#define SCORES (TILE * GROUP)
#define SPREAD (32 / SCORES)  // lanes that hold the same score
#if KV_BYTES == 4
typedef float Stored;
__device__ inline float stored_value(float value) { return value; }
#else
typedef u16 Stored;
__device__ inline float stored_value(u32 bits) {
#ifdef KV_BF16
    return __uint_as_float(bits << 16);
#else
    return half_value(bits);
#endif
}
#endif

struct alignas(DIMS % 4 == 0 ? 4 * KV_BYTES : DIMS % 2 == 0 ? 2 * KV_BYTES : KV_BYTES) Slice {
    Stored dims[DIMS];
};

// Each lane has a part of each of COUNT sums; lane i gets the whole of sum i * COUNT / 32. At each
// level lanes 2 * STEP apart swap halves. Recursion, so that `parts` stays in registers.
template <int COUNT, int STEP>
__device__ inline float share_sums(const float (&parts)[COUNT]) {
    if constexpr (STEP == 0) {
        return parts[0];
    } else if constexpr (COUNT == 1) {
        const float sum[1] = {parts[0] + __shfl_xor_sync(~0u, parts[0], STEP)};
        return share_sums<1, STEP / 2>(sum);
    } else {
        const bool upper = threadIdx.x & STEP;
        float halves[COUNT / 2];
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
            const float low = parts[i], high = parts[i + COUNT / 2];
            const float received = __shfl_xor_sync(~0u, upper ? low : high, STEP);
            halves[i] = (upper ? high : low) + received;
        }
        return share_sums<COUNT / 2, STEP / 2>(halves);
    }
}

// What a warp knows of its keys. In lane i: for head i / SPREAD % GROUP, the largest score, and the
// sum of exponentials over the keys this lane held.
struct State {
    float largest, total;
    float mixed[GROUP][DIMS];
};

// A lane's dimensions of TILE keys and their values; beyond `end` the last one's.
struct Tile {
    Slice keys[TILE], values[TILE];
};

__device__ inline void load_tile(Tile& tile, const Stored* keys, const Stored* values,
                                 u64 key_stride, int first, int end) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < TILE; ++k) {
        const u64 at = min(first + k, end - 1) * key_stride + lane * DIMS;
        tile.keys[k] = *(const Slice*)(keys + at);
        tile.values[k] = *(const Slice*)(values + at);
    }
}

__device__ inline void add_tile(State& state, const float (&q)[GROUP][DIMS], const Tile& tile,
                                int first, int end) {
    const int lane = threadIdx.x % 32;
    float parts[SCORES];
#pragma unroll
    for (int k = 0; k < TILE; ++k) {
#pragma unroll
        for (int h = 0; h < GROUP; ++h) {
            float part = 0;
#pragma unroll
            for (int d = 0; d < DIMS; ++d)
                part = fmaf(q[h][d], stored_value(tile.keys[k].dims[d]), part);
            parts[k * GROUP + h] = part;
        }
    }
    float score = share_sums<SCORES, 16>(parts);
    if (first + lane / SPREAD / GROUP >= end) score = no_score();
    float largest = fmaxf(state.largest, score);
#pragma unroll
    for (int step = 16; step >= SPREAD * GROUP; step /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    const float fading = exp2f(state.largest - largest);
    const float weight = exp2f(score - largest);
    state.total = fmaf(state.total, fading, weight);
    if (__any_sync(~0u, largest > state.largest)) {
#pragma unroll
        for (int h = 0; h < GROUP; ++h) {
            const float factor = __shfl_sync(~0u, fading, h * SPREAD);
#pragma unroll
            for (int d = 0; d < DIMS; ++d) state.mixed[h][d] *= factor;
        }
    }
    state.largest = largest;
#pragma unroll
    for (int k = 0; k < TILE; ++k) {
#pragma unroll
        for (int h = 0; h < GROUP; ++h) {
            const float factor = __shfl_sync(~0u, weight, (k * GROUP + h) * SPREAD);
#pragma unroll
            for (int d = 0; d < DIMS; ++d)
                state.mixed[h][d] =
                    fmaf(factor, stored_value(tile.values[k].dims[d]), state.mixed[h][d]);
        }
    }
}

// Join the warps' states and store this block's section.
__device__ inline void store_section(const State& state, const Sections& to, u64 first_row,
                                     int head_count) {
    __shared__ Joined joined;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum = state.total;
#pragma unroll
    for (int step = 16; step >= SPREAD * GROUP; step /= 2)
        sum += __shfl_xor_sync(~0u, sum, step);
    if (lane < SPREAD * GROUP && lane % SPREAD == 0) {
        joined.largest[warp][lane / SPREAD] = state.largest;
        joined.total[warp][lane / SPREAD] = sum;
    }
#pragma unroll
    for (int h = 0; h < GROUP; ++h) {
#pragma unroll
        for (int d = 0; d < DIMS; ++d) joined.mixed[warp][h][lane * DIMS + d] = state.mixed[h][d];
    }
    join_warps(joined, to, first_row, head_count);
}

// q [tokens, heads, HEAD_DIM]; keys, values [context, kv_heads, HEAD_DIM]. Grid (sections, kv_heads *
// parts, tokens): a key head's query heads are taken GROUP at a time. The first token's position is
// start_at[0] if given, else start. Blocks beyond the last section have nothing to do.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    attend(const float* q, const Stored* keys, const Stored* values, const int* start_at, int start,
           float scale, int heads, int kv_heads, const Sections sections) {
    const int length = (start_at ? *start_at : start) + blockIdx.z + 1;
    const int section = section_length(length);
    const int first = blockIdx.x * section, end = min(first + section, length);
    if (first >= length) return;
    const int parts = gridDim.y / kv_heads, sharing = heads / kv_heads;
    const int kv_head = blockIdx.y / parts, part = blockIdx.y % parts;
    const int head_count = min(GROUP, sharing - part * GROUP);
    const u64 first_row = (u64)blockIdx.z * heads + kv_head * sharing + part * GROUP;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float factor = scale * 1.44269504f;  // for powers of two
    float queries[GROUP][DIMS];
    State state = {no_score(), 0, {}};
#pragma unroll
    for (int h = 0; h < GROUP; ++h) {
        const u64 row = first_row + min(h, head_count - 1);
#pragma unroll
        for (int d = 0; d < DIMS; ++d)
            queries[h][d] = q[row * HEAD_DIM + lane * DIMS + d] * factor;
    }
    const u64 key_stride = (u64)kv_heads * HEAD_DIM;
    keys += kv_head * HEAD_DIM;
    values += kv_head * HEAD_DIM;
    for (int at = first + warp * TILE; at < end; at += WARPS * TILE) {
        Tile tile;
        load_tile(tile, keys, values, key_stride, at, end);
        add_tile(state, queries, tile, at, end);
    }
    store_section(state, sections, first_row, head_count);
}
