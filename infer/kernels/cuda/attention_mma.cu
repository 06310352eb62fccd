// Attention on tensor cores, for caches of 16-bit numbers (sm_80 and up).
//
// Compiled for HEAD_DIM (a multiple of 64), GROUP 8 and KV_BF16. A warp takes 16 keys at a time:
// scores = queries (8 of 16 rows used) x keys, in products m16n8k16 of 8 keys and 16 dimensions; then
// mixed = values x weights, of 16 dimensions, 8 heads and 16 keys. Lane 4 g + t has rows g and g + 8
// of a left side, column g of a right side, and of sums rows g and g + 8, columns 2 t and 2 t + 1: so
// the weights come out as the next product's right side lies. Sums may run over dimensions and keys
// in any order, so lanes load 16 bytes at a time:
//     queries, keys: dimensions 32 j + 8 t .. + 7 of row g, for two products each
//     values: of keys 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t dimensions 64 j + 8 g .. + 7, its slots 8 j ..
// Queries and weights are rounded to the cache's type; sums are in float32.
#include "attention.cuh"

#define KEY_PARTS (HEAD_DIM / 32)
#define VALUE_PARTS (HEAD_DIM / 64)
#define SLOTS (HEAD_DIM / 8)  // dimensions of the values in a lane
#define TILE 16

__device__ inline u32 pack(float low, float high) {
    u32 packed;
#ifdef KV_BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
    return packed;
}

// sums += left x right
__device__ inline void multiply(float (&sums)[4], u32 left_0, u32 left_1, u32 left_2, u32 left_3,
                                u32 right_0, u32 right_1) {
#ifdef KV_BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left_0), "r"(left_1), "r"(left_2), "r"(left_3), "r"(right_0), "r"(right_1));
}

// Of head g: the largest score and this lane's share of the sum of exponentials. mixed[i]: of slots
// i and i + SLOTS / 2 the sums for heads 2 t and 2 t + 1.
struct State {
    float largest, total;
    float mixed[SLOTS / 2][4];
};

struct Tile {
    uint4 keys[2][KEY_PARTS];
    uint4 values[4][VALUE_PARTS];
};

__device__ inline void load_tile(Tile& tile, const u16* keys, const u16* values, u64 key_stride,
                                 int first, int end) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u16* row = keys + min(first + 8 * half + g, end - 1) * key_stride + 8 * t;
#pragma unroll
        for (int j = 0; j < KEY_PARTS; ++j) tile.keys[half][j] = *(const uint4*)(row + 32 * j);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int key = first + i / 2 * 8 + 2 * t + i % 2;
        const u16* row = values + min(key, end - 1) * key_stride + 8 * g;
#pragma unroll
        for (int j = 0; j < VALUE_PARTS; ++j) tile.values[i][j] = *(const uint4*)(row + 64 * j);
    }
}

__device__ inline u32 word(const uint4& four, int i) {
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// A slot's values of two keys in one word: of 2 t and 2 t + 1, or of 8 more (pair 1).
__device__ inline u32 two_keys(const Tile& tile, int slot, int pair) {
    const uint4 &first = tile.values[2 * pair][slot / 8], &second = tile.values[2 * pair + 1][slot / 8];
    const int at = slot % 8 / 2;
    return __byte_perm(word(first, at), word(second, at), slot % 2 ? 0x7632 : 0x5410);
}

__device__ inline void add_tile(State& state, const uint4 (&queries)[KEY_PARTS], const Tile& tile,
                                float factor, int first, int end) {
    const int t = threadIdx.x % 4;
    float weights[4];
    float largest = state.largest;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float scores[4] = {};
#pragma unroll
        for (int j = 0; j < KEY_PARTS; ++j) {
            const uint4 q = queries[j], k = tile.keys[half][j];
            multiply(scores, q.x, 0, q.y, 0, k.x, k.y);
            multiply(scores, q.z, 0, q.w, 0, k.z, k.w);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool there = first + 8 * half + 2 * t + i < end;
            weights[2 * half + i] = there ? scores[i] * factor : no_score();
            largest = fmaxf(largest, weights[2 * half + i]);
        }
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const float fading = exp2f(state.largest - largest);
    if (__any_sync(~0u, largest > state.largest)) {
        const float even = __shfl_sync(~0u, fading, 8 * t);  // of heads 2 t and 2 t + 1
        const float odd = __shfl_sync(~0u, fading, 8 * t + 4);
#pragma unroll
        for (int i = 0; i < SLOTS / 2; ++i) {
            state.mixed[i][0] *= even;
            state.mixed[i][1] *= odd;
            state.mixed[i][2] *= even;
            state.mixed[i][3] *= odd;
        }
    }
    state.largest = largest;
    state.total *= fading;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        weights[i] = exp2f(weights[i] - largest);
        state.total += weights[i];
    }
    const u32 low = pack(weights[0], weights[1]), high = pack(weights[2], weights[3]);
#pragma unroll
    for (int i = 0; i < SLOTS / 2; ++i) {
        const int other = i + SLOTS / 2;
        multiply(state.mixed[i], two_keys(tile, i, 0), two_keys(tile, other, 0),
                 two_keys(tile, i, 1), two_keys(tile, other, 1), low, high);
    }
}

__device__ inline void store_section(const State& state, const Sections& to, u64 first_row,
                                     int head_count) {
    __shared__ Joined joined;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
    float sum = state.total;
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    joined.largest[warp][g] = state.largest;
    joined.total[warp][g] = sum;
#pragma unroll
    for (int i = 0; i < SLOTS / 2; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int slot = i + k / 2 * (SLOTS / 2);
            joined.mixed[warp][2 * t + k % 2][slot / 8 * 64 + 8 * g + slot % 8] = state.mixed[i][k];
        }
    }
    join_warps(joined, to, first_row, head_count);
}

// As `attend` of attention.cu.
extern "C" __global__ void __launch_bounds__(32 * WARPS, HEAD_DIM > 128 ? 1 : 3)
    attend(const float* q, const u16* keys, const u16* values, const int* start_at, int start,
           float scale, int heads, int kv_heads, const Sections sections) {
    const int length = (start_at ? *start_at : start) + blockIdx.z + 1;
    const int section = section_length(length);
    const int first = blockIdx.x * section, end = min(first + section, length);
    if (first >= length) return;
    const int parts = gridDim.y / kv_heads, sharing = heads / kv_heads;
    const int kv_head = blockIdx.y / parts, part = blockIdx.y % parts;
    const int head_count = min(GROUP, sharing - part * GROUP);
    const u64 first_row = (u64)blockIdx.z * heads + kv_head * sharing + part * GROUP;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
    uint4 queries[KEY_PARTS];
#pragma unroll
    for (int j = 0; j < KEY_PARTS; ++j) {
        const float* row = q + (first_row + min(g, head_count - 1)) * HEAD_DIM + 32 * j + 8 * t;
        queries[j] = make_uint4(pack(row[0], row[1]), pack(row[2], row[3]), pack(row[4], row[5]),
                                pack(row[6], row[7]));
    }
    State state = {no_score(), 0, {}};
    const u64 key_stride = (u64)kv_heads * HEAD_DIM;
    keys += kv_head * HEAD_DIM;
    values += kv_head * HEAD_DIM;
    for (int at = first + warp * TILE; at < end; at += WARPS * TILE) {
        Tile tile;
        load_tile(tile, keys, values, key_stride, at, end);
        add_tile(state, queries, tile, scale * 1.44269504f, at, end);
    }
    store_section(state, sections, first_row, head_count);
}
