// The gated blocks of experts at addresses in device memory, for up to TOKENS pairs a tile.
#include "dot.cuh"
#include "tiles.cuh"

#define OUTPUT_ROWS 32  // of a block of WARPS
#define PASSES (OUTPUT_ROWS / (2 * WARPS))

#ifdef GATE

// silu(gate x) * (up x), 32 rows a block: hidden [positions, d_ff], as floats or quantised.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    gate_up(const u64* gates, const u64* ups, const Tiles tiles, const Inputs x, int d_ff,
            float* hidden, const QuantisedRows quantised, const u32* gate_grid_source,
            const u32* up_grid_source) {
    const int warp_bytes = Chunk<GATE>::WARP_BYTES > Chunk<UP>::WARP_BYTES
                               ? Chunk<GATE>::WARP_BYTES
                               : Chunk<UP>::WARP_BYTES;
    __shared__ alignas(16) u8 buffers[WARPS * warp_bytes + 16];
    __shared__ u32 gate_grid[GATE::TABLE_WORDS + 1], up_grid[UP::TABLE_WORDS + 1];
    __shared__ float products[TOKENS][OUTPUT_ROWS];
    const Tile tile = this_tile(tiles);
    const u64 gate = gates[tile.expert], up = ups[tile.expert];
    if (!gate || !up) return;
    load_grid<GATE>(gate_grid_source, gate_grid);
    load_grid<UP>(up_grid_source, up_grid);
    __syncthreads();
    const int half_warp = threadIdx.x / 16, warp = threadIdx.x / 32;
    Rows rows = {(const u8*)gate, x.columns, d_ff, (int)blockIdx.x * OUTPUT_ROWS + half_warp,
                 2 * WARPS,       PASSES};
    int tokens[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
        tokens[t] = pair_at(tiles, tile.first + min(t, tile.count - 1)) / tiles.top_k;
    u8* buffer = buffers + warp * warp_bytes;
    dot_rows<GATE>(rows, x, tokens, buffer, gate_grid,
                   [&](int pass, const float(&sums)[TOKENS]) {
                       if (threadIdx.x % 16) return;
#pragma unroll
                       for (int t = 0; t < TOKENS; ++t)
                           products[t][half_warp + 2 * WARPS * pass] = sums[t];
                   });
    rows.matrix = (const u8*)up;
    dot_rows<UP>(rows, x, tokens, buffer, up_grid, [&](int pass, const float(&sums)[TOKENS]) {
        if (threadIdx.x % 16) return;
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            float& product = products[t][half_warp + 2 * WARPS * pass];
            product = __fdiv_rn(product, 1.0f + expf(-product)) * sums[t];
        }
    });
    __syncthreads();
    const int lane = threadIdx.x % 32, row = blockIdx.x * OUTPUT_ROWS + lane;
    for (int t = warp; t < tile.count; t += WARPS) {
        const float value = row < d_ff ? products[t][lane] : 0.0f;
#ifdef HIDDEN_FLOAT
        if (row < d_ff) hidden[(u64)(tile.first + t) * d_ff + row] = value;
#else
        store_piece(quantised, tile.first + t, blockIdx.x, value);
#endif
    }
}
#else

// out [pairs, d_model]: the row of a pair is FORMAT's product with its hidden row.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    down(const u64* downs, const Tiles tiles, const Inputs hidden, int d_model, float* out,
         const u32* grid_source) {
    __shared__ alignas(16) u8 buffers[WARPS * Chunk<FORMAT>::WARP_BYTES + 16];
    __shared__ u32 grid[FORMAT::TABLE_WORDS + 1];
    const Tile tile = this_tile(tiles);
    const u64 matrix = downs[tile.expert];
    if (!matrix) return;
    load_grid<FORMAT>(grid_source, grid);
    __syncthreads();
    const int half_warp = threadIdx.x / 16, warp = threadIdx.x / 32;
    const Rows rows = {(const u8*)matrix, hidden.columns, d_model,
                       (int)blockIdx.x * OUTPUT_ROWS + half_warp, 2 * WARPS, PASSES};
    int positions[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) positions[t] = tile.first + min(t, tile.count - 1);
    dot_rows<FORMAT>(rows, hidden, positions, buffers + warp * Chunk<FORMAT>::WARP_BYTES, grid,
                     [&](int pass, const float(&sums)[TOKENS]) {
                         const int row = rows.first + pass * rows.step;
                         if (threadIdx.x % 16 || row >= d_model) return;
#pragma unroll
                         for (int t = 0; t < TOKENS; ++t)
                             if (t < tile.count)
                                 out[(u64)pair_at(tiles, positions[t]) * d_model + row] = sums[t];
                     });
}
#endif
