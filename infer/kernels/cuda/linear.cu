// x W^T for up to 8 matrices of one FORMAT and up to TOKENS rows of x, one launch.
#include "dot.cuh"

#define WARPS 4
#define PASSES 1
#define MATRICES 8

struct Group {
    const u8* matrices[MATRICES];
    float* outputs[MATRICES];  // [tokens, rows]
    int rows[MATRICES];
    int end_block[MATRICES];
};

#define BLOCK_ROWS (2 * WARPS * PASSES)

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    linear(const Group group, const Inputs x, int token_count, const u32* grid_source) {
    __shared__ alignas(16) u8 buffers[WARPS * Chunk<FORMAT>::WARP_BYTES + 16];
    __shared__ u32 grid[FORMAT::TABLE_WORDS + 1];
    load_grid<FORMAT>(grid_source, grid);
    __syncthreads();
    int which = 0;
    while ((int)blockIdx.x >= group.end_block[which]) ++which;
    const int block = blockIdx.x - (which ? group.end_block[which - 1] : 0);
    const int half_warp = threadIdx.x / 16, warp = threadIdx.x / 32;
    const Rows rows = {group.matrices[which],          x.columns,   group.rows[which],
                       block * BLOCK_ROWS + half_warp, 2 * WARPS, PASSES};
    int tokens[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) tokens[t] = min(t, token_count - 1);
    float* output = group.outputs[which];
    dot_rows<FORMAT>(rows, x, tokens, buffers + warp * Chunk<FORMAT>::WARP_BYTES, grid,
                     [&](int pass, const float(&sums)[TOKENS]) {
                         const int row = rows.first + pass * rows.step;
                         if (threadIdx.x % 16 || row >= rows.count) return;
#pragma unroll
                         for (int t = 0; t < TOKENS; ++t)
                             if (t < token_count) output[(u64)t * rows.count + row] = sums[t];
                     });
}
