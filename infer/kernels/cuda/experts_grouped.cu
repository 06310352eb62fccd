// The gated blocks of experts that many tokens chose, on tensor cores.
//
// A block multiplies ROWS rows of an expert by a tile of up to TOKENS pairs, in stages of 8 pieces:
//
//     copy       the rows' bytes to shared memory        | while the stage before is multiplied
//     decode     a piece a thread: codes and scales      | while the tokens' codes are copied
//     multiply   each warp 16 rows by every other 8 of the tokens
//
// A piece's product is made as add_piece does it (dot.cuh), from exact integers; the pieces of a row
// are added in their order. A weight is decoded once a tile, where experts.cu does it for 8 tokens.
#include "dot.cuh"
#include "mma8.cuh"
#include "tiles.cuh"

#define ROWS 64
#define WARPS 8
#define PIECES 8
#define CODE_WORDS (8 * PIECES + 4)  // of a row, padded: a fragment's loads fall into all banks
#define SCALE_ROWS (ROWS + 8)
#define COLUMN_TILES (TOKENS / 16)  // of 8 tokens, of a warp: every other one

template <class F>
struct Stage {
    static const int BYTES = 32 * PIECES / F::BLOCK_WEIGHTS * F::BLOCK_BYTES;
    static const int GRANULES = (BYTES + 30) / 16;  // whatever the first byte's skew
    static const int SCALES = F::ONE_SCALE ? 1 : 2;
    static const int OFFSETS = F::OFFSET ? SCALES : 0;

    const u8* row_starts[ROWS];
    int input_rows[TOKENS];
    alignas(16) u8 bytes[ROWS * 16 * GRANULES];
    alignas(16) u32 weights[ROWS][CODE_WORDS];   // [piece][8]; in the end the products
    alignas(16) u32 inputs[TOKENS][CODE_WORDS];  // [half][piece][4]
    float scales[SCALES][PIECES][SCALE_ROWS];
    float offsets[OFFSETS ? OFFSETS : 1][PIECES][OFFSETS ? SCALE_ROWS : 1];
    float input_scales[PIECES][TOKENS];
    float input_sums[OFFSETS ? OFFSETS : 1][PIECES][OFFSETS ? TOKENS : 1];
    u32 grid[F::TABLE_WORDS + 1];
};

typedef Stage<FORMAT> S;
typedef const float (*Products)[CODE_WORDS];  // [tokens], the first ROWS of each

__device__ inline const u8* stage_start(const S& shared, int row, int stage) {
    return shared.row_starts[row] + (u64)stage * S::BYTES;
}

__device__ inline void copy_rows(S& shared, int stage, int pieces) {
    const int bytes = pieces * 32 / FORMAT::BLOCK_WEIGHTS * FORMAT::BLOCK_BYTES;
    for (int i = threadIdx.x; i < ROWS * S::GRANULES; i += 32 * WARPS) {
        const int row = i / S::GRANULES, at = i % S::GRANULES * 16;
        const u8* from = stage_start(shared, row, stage);
        const int skew = (int)((u64)from & 15);
        if (at < skew + bytes) copy_granule(shared.bytes + 16 * i, from - skew + at);
    }
    close_copies();
}

__device__ inline void decode_rows(S& shared, int stage, int pieces) {
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * PIECES; i += 32 * WARPS) {
        const int row = i / PIECES, p = i % PIECES;
        if (p >= pieces) continue;
        const int skew = (int)((u64)stage_start(shared, row, stage) & 15);
        Piece piece;
        FORMAT::decode(shared.bytes + row * 16 * S::GRANULES + skew, p, shared.grid, piece);
        uint4* to = (uint4*)&shared.weights[row][8 * p];
        to[0] = make_uint4(piece.codes[0], piece.codes[1], piece.codes[2], piece.codes[3]);
        to[1] = make_uint4(piece.codes[4], piece.codes[5], piece.codes[6], piece.codes[7]);
#pragma unroll
        for (int part = 0; part < S::SCALES; ++part) {
            shared.scales[part][p][row] = piece.scale[part];
            if (FORMAT::OFFSET) shared.offsets[part][p][row] = piece.offset[part];
        }
    }
}

__device__ inline void copy_inputs(S& shared, const Inputs& x, int tokens, int stage) {
    const int group = stage * PIECES / 16, lane = stage * PIECES % 16;
    for (int i = threadIdx.x; i < tokens * 2 * PIECES; i += 32 * WARPS) {
        const int t = i / (2 * PIECES), half = i / PIECES % 2, p = i % PIECES;
        const uint4* from = x.codes + ((u64)shared.input_rows[t] * x.groups + group) * 32;
        copy_granule((u8*)&shared.inputs[t][4 * PIECES * half + 4 * p],
                     (const u8*)(from + 16 * half + lane + p));
    }
    close_copies();
    for (int i = threadIdx.x; i < tokens * PIECES; i += 32 * WARPS) {
        const int t = i / PIECES, p = i % PIECES;
        const Mark mark = x.marks[((u64)shared.input_rows[t] * x.groups + group) * 16 + lane + p];
        shared.input_scales[p][t] = mark.scale;
        if (FORMAT::OFFSET) {
            const float first = (float)(short)(mark.sums & 0xffff);
            const float second = (float)(short)(mark.sums >> 16);
            if (FORMAT::ONE_SCALE) {
                shared.input_sums[0][p][t] = first + second;
            } else {
                shared.input_sums[0][p][t] = first;
                shared.input_sums[1][p][t] = second;
            }
        }
    }
}

// sums [column tile][row 0, row 0, row 8, row 8]: as a warp's accumulators lie. Its first column
// tile is `half`, the next one two further on; those without one of the `tokens` are left out.
__device__ inline void multiply(const S& shared, int first_row, int half, int tokens, int pieces,
                                float (&sums)[COLUMN_TILES][4]) {
    const int g = threadIdx.x % 32 / 4, i = threadIdx.x % 4;
    const u32 *upper = shared.weights[first_row + g], *lower = shared.weights[first_row + g + 8];
    for (int p = 0; p < pieces; ++p) {
        const u32 a[4] = {upper[8 * p + i], lower[8 * p + i], upper[8 * p + 4 + i],
                          lower[8 * p + 4 + i]};
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; ++n) {
            const int token = 8 * (2 * n + half);
            if (token >= tokens) break;
            const u32* column = shared.inputs[token + g];
            float dots[2][4];
            multiply_halves<FORMAT::ONE_SCALE>(dots, a, column[4 * p + i],
                                               column[4 * PIECES + 4 * p + i]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int row = first_row + g + j / 2 * 8, at = token + 2 * i + j % 2;
                float part = shared.scales[0][p][row] * dots[0][j];
                if (!FORMAT::ONE_SCALE)
                    part = fmaf(shared.scales[S::SCALES - 1][p][row], dots[1][j], part);
#pragma unroll
                for (int k = 0; k < S::OFFSETS; ++k)
                    part = fmaf(shared.offsets[k][p][row], shared.input_sums[k][p][at], part);
                sums[n][j] = fmaf(shared.input_scales[p][at], part, sums[n][j]);
            }
        }
    }
}

// Whole rows times the tile's inputs, once row_starts and input_rows are there.
__device__ inline Products multiply_rows(S& shared, const Inputs& x, int tokens) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, i = threadIdx.x % 4;
    const int first_row = warp % 4 * 16, half = warp / 4;
    const int all = x.columns / 32, stages = (all + PIECES - 1) / PIECES;
    float sums[COLUMN_TILES][4] = {};
    __syncthreads();
    copy_rows(shared, 0, min(PIECES, all));
    for (int stage = 0; stage < stages; ++stage) {
        const int pieces = min(PIECES, all - stage * PIECES);
        await_copies();
        __syncthreads();
        copy_inputs(shared, x, tokens, stage);
        decode_rows(shared, stage, pieces);
        await_copies();
        __syncthreads();
        if (stage + 1 < stages)
            copy_rows(shared, stage + 1, min(PIECES, all - (stage + 1) * PIECES));
        multiply(shared, first_row, half, tokens, pieces, sums);
    }
    __syncthreads();
    float(*products)[CODE_WORDS] = (float(*)[CODE_WORDS])shared.weights;
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int token = 8 * (2 * n + half) + 2 * i + j % 2;
            products[token][first_row + g + j / 2 * 8] = sums[n][j];
        }
    __syncthreads();
    return products;
}

#ifdef GATED

// silu(gate x) * (up x): hidden [positions, d_ff] quantised, 32 rows a block.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    gate_up(const u64* gates, const u64* ups, const Tiles tiles, const Inputs x, int d_ff,
            const QuantisedRows hidden, const u32* grid_source) {
    __shared__ S shared;
    const Tile tile = this_tile(tiles);
    const u64 gate = gates[tile.expert], up = ups[tile.expert];
    if (!gate || !up) return;
    load_grid<FORMAT>(grid_source, shared.grid);
    const u64 row_bytes = (u64)x.columns / FORMAT::BLOCK_WEIGHTS * FORMAT::BLOCK_BYTES;
    const int first = blockIdx.x * (ROWS / 2);
    const int thread = threadIdx.x, lane = thread % 32;
    if (thread < ROWS) {
        const u8* matrix = (const u8*)(thread < ROWS / 2 ? gate : up);
        shared.row_starts[thread] = matrix + min(first + lane, d_ff - 1) * row_bytes;
    } else if (thread < ROWS + tile.count) {
        shared.input_rows[thread - ROWS] =
            pair_at(tiles, tile.first + thread - ROWS) / tiles.top_k;
    }
    const Products products = multiply_rows(shared, x, tile.count);
    for (int t = thread / 32; t < tile.count; t += WARPS) {
        const float product = products[t][lane];
        const float value =
            __fdiv_rn(product, 1.0f + expf(-product)) * products[t][ROWS / 2 + lane];
        store_piece(hidden, tile.first + t, blockIdx.x, first + lane < d_ff ? value : 0.0f);
    }
}
#else

// out [pairs, d_model]: the row of a pair is FORMAT's product with its hidden row.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    down(const u64* downs, const Tiles tiles, const Inputs hidden, int d_model, float* out,
         const u32* grid_source) {
    __shared__ S shared;
    const Tile tile = this_tile(tiles);
    const u64 matrix = downs[tile.expert];
    if (!matrix) return;
    load_grid<FORMAT>(grid_source, shared.grid);
    const u64 row_bytes = (u64)hidden.columns / FORMAT::BLOCK_WEIGHTS * FORMAT::BLOCK_BYTES;
    const int first = blockIdx.x * ROWS;
    const int thread = threadIdx.x;
    if (thread < ROWS) {
        shared.row_starts[thread] =
            (const u8*)matrix + min(first + thread, d_model - 1) * row_bytes;
    } else if (thread < ROWS + tile.count) {
        shared.input_rows[thread - ROWS] = tile.first + thread - ROWS;
    }
    const Products products = multiply_rows(shared, hidden, tile.count);
    for (int i = thread; i < tile.count * ROWS; i += 32 * WARPS) {
        const int t = i / ROWS, row = i % ROWS;
        if (first + row < d_model)
            out[(u64)pair_at(tiles, tile.first + t) * d_model + first + row] = products[t][row];
    }
}
#endif
