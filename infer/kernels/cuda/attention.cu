// Causal grouped-query attention over a cache, by online softmax over sections of the context.
//
// Compiled for HEAD_DIM (a multiple of 32), GROUP (query heads of one key head that a block takes, a
// power of two up to 8) and KV_BYTES, KV_BF16. A block of 4 warps takes one section of the context
// for one token; its warps take tiles of TILE keys in turn. A lane holds HEAD_DIM / 32 dimensions.
// Then `combine` joins the sections. Sections depend on the position alone, never on the batch.
#include "bits.cuh"

#define WARPS 4
#define DIMS (HEAD_DIM / 32)
#define TILE (GROUP == 8 ? 4 : 8)
#define SCORES (TILE * GROUP)
// Blocks on a multiprocessor that registers are kept free for, where that is not too few of them.
#define RESIDENT_BLOCKS (HEAD_DIM * KV_BYTES <= 256 ? 4 : 1)
#define SPREAD (32 / SCORES)  // lanes that hold the same score
#define MOST_SECTIONS 64
#define SLICES 4  // of the sections, joined at once by `combine`
#define LEAST_SECTION 64

__device__ inline float no_score() { return __int_as_float(0xff800000); }

__device__ inline int section_length(int length) {
    const int even = (length + MOST_SECTIONS - 1) / MOST_SECTIONS;
    return max(LEAST_SECTION, (even + WARPS * TILE - 1) / (WARPS * TILE) * (WARPS * TILE));
}

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

// What `combine` reads: mixed [rows, MOST_SECTIONS, HEAD_DIM], marks [rows, MOST_SECTIONS] (largest
// score, sum), where a row is token * heads + head.
struct Sections {
    float* mixed;
    float2* marks;
};

// Join the warps' states and store this block's section.
__device__ inline void store_section(const State& state, const Sections& to, u64 first_row,
                                     int head_count) {
    __shared__ float mixed[WARPS][GROUP][HEAD_DIM];
    __shared__ float largest[WARPS][GROUP], total[WARPS][GROUP];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum = state.total;
#pragma unroll
    for (int step = 16; step >= SPREAD * GROUP; step /= 2)
        sum += __shfl_xor_sync(~0u, sum, step);
    if (lane < SPREAD * GROUP && lane % SPREAD == 0) {
        largest[warp][lane / SPREAD] = state.largest;
        total[warp][lane / SPREAD] = sum;
    }
#pragma unroll
    for (int h = 0; h < GROUP; ++h) {
#pragma unroll
        for (int d = 0; d < DIMS; ++d) mixed[warp][h][lane * DIMS + d] = state.mixed[h][d];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < head_count * HEAD_DIM; i += 32 * WARPS) {
        const int h = i / HEAD_DIM, d = i % HEAD_DIM;
        float top = largest[0][h], value = 0, sums = 0;
        for (int w = 1; w < WARPS; ++w) top = fmaxf(top, largest[w][h]);
        for (int w = 0; w < WARPS; ++w) {
            const float factor = exp2f(largest[w][h] - top);
            value = fmaf(factor, mixed[w][h][d], value);
            sums = fmaf(factor, total[w][h], sums);
        }
        const u64 at = (first_row + h) * MOST_SECTIONS + blockIdx.x;
        to.mixed[at * HEAD_DIM + d] = value;
        if (d == 0) to.marks[at] = make_float2(top, sums);
    }
}

// q [tokens, heads, HEAD_DIM]; keys, values [context, kv_heads, HEAD_DIM]. Grid (sections, kv_heads *
// parts, tokens): a key head's query heads are taken GROUP at a time. The first token's position is
// start_at[0] if given, else start. Blocks beyond the last section have nothing to do.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT_BLOCKS)
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
    int at = first + warp * TILE;
    Tile tile;
    if (at < end) load_tile(tile, keys, values, key_stride, at, end);
    while (at < end) {
        const int next = at + WARPS * TILE;
        Tile next_tile;
        load_tile(next_tile, keys, values, key_stride, next, end);
        add_tile(state, queries, tile, at, end);
        tile = next_tile;
        at = next;
    }
    store_section(state, sections, first_row, head_count);
}

// out [tokens, heads, HEAD_DIM]; grid (heads, tokens), SLICES * HEAD_DIM threads.
extern "C" __global__ void combine(const Sections sections, const int* start_at, int start,
                                   float* out) {
    __shared__ float values[SLICES][HEAD_DIM], totals[SLICES];
    const int length = (start_at ? *start_at : start) + blockIdx.y + 1;
    const int section = section_length(length);
    const int count = (length + section - 1) / section;
    const u64 row = (u64)blockIdx.y * gridDim.x + blockIdx.x;
    const int slice = threadIdx.x / HEAD_DIM, dim = threadIdx.x % HEAD_DIM;
    const float2* marks = sections.marks + row * MOST_SECTIONS;
    const float* mixed = sections.mixed + row * MOST_SECTIONS * HEAD_DIM + dim;
    float top = no_score(), value = 0, total = 0;
#pragma unroll 8
    for (int i = 0; i < count; ++i) top = fmaxf(top, marks[i].x);
#pragma unroll 8
    for (int i = slice; i < count; i += SLICES) {
        const float factor = exp2f(marks[i].x - top);
        value = fmaf(factor, mixed[(u64)i * HEAD_DIM], value);
        total = fmaf(factor, marks[i].y, total);
    }
    values[slice][dim] = value;
    if (dim == 0) totals[slice] = total;
    __syncthreads();
    if (slice) return;
    for (int i = 1; i < SLICES; ++i) {
        value += values[i][dim];
        total += totals[i];
    }
    out[row * HEAD_DIM + dim] = __fdiv_rn(value, total);
}
