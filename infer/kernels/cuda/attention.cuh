// Causal grouped-query attention over a cache, by online softmax over sections of the context: a
// block of 4 warps takes one section for one token, then `combine` joins the sections. Sections
// depend on the position alone, never on the batch.
#pragma once
#include "inputs.cuh"

#define WARPS 4
#define MOST_SECTIONS 96
#define LEAST_SECTION 64  // a multiple of what the warps take at once
#define SLICES 4          // of the sections, joined at once by `combine`

__device__ inline float no_score() { return __int_as_float(0xff800000); }

__device__ inline int section_length(int length) {
    const int even = (length + MOST_SECTIONS - 1) / MOST_SECTIONS;
    return (even + LEAST_SECTION - 1) / LEAST_SECTION * LEAST_SECTION;
}

// What `combine` reads: mixed [rows, MOST_SECTIONS, HEAD_DIM], marks [rows, MOST_SECTIONS] (largest
// score, sum), where a row is token * heads + head.
struct Sections {
    float* mixed;
    float2* marks;
};

// The states of a block's warps, for each head.
struct Joined {
    float mixed[WARPS][GROUP][HEAD_DIM];
    float largest[WARPS][GROUP], total[WARPS][GROUP];
};

// All threads, after each warp has written its part.
__device__ inline void join_warps(const Joined& from, const Sections& to, u64 first_row,
                                  int head_count) {
    __syncthreads();
    for (int i = threadIdx.x; i < head_count * HEAD_DIM; i += 32 * WARPS) {
        const int h = i / HEAD_DIM, d = i % HEAD_DIM;
        float top = from.largest[0][h], value = 0, sums = 0;
        for (int w = 1; w < WARPS; ++w) top = fmaxf(top, from.largest[w][h]);
        for (int w = 0; w < WARPS; ++w) {
            const float factor = exp2f(from.largest[w][h] - top);
            value = fmaf(factor, from.mixed[w][h][d], value);
            sums = fmaf(factor, from.total[w][h], sums);
        }
        const u64 at = (first_row + h) * MOST_SECTIONS + blockIdx.x;
        to.mixed[at * HEAD_DIM + d] = value;
        if (d == 0) to.marks[at] = make_float2(top, sums);
    }
}

// out [tokens, heads, HEAD_DIM], also in 8 bit where codes are wanted; grid (heads, tokens),
// SLICES * HEAD_DIM threads.
extern "C" __global__ void combine(const Sections sections, const int* start_at, int start,
                                   float* out, const QuantisedRows to) {
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
    value = __fdiv_rn(value, total);
    out[row * HEAD_DIM + dim] = value;
    if (to.codes) store_piece(to, blockIdx.y, (blockIdx.x * HEAD_DIM + dim) / 32, value);
}
