// What is done to rows of activations between the products.
#include "inputs.cuh"
#include "sums.cuh"

// x [rows, columns] to pieces, a warp each; grid (blocks of 8 warps over the pieces, rows).
extern "C" __global__ void quantize_rows(const float* x, int columns, const QuantisedRows to) {
    const int piece = blockIdx.x * 8 + threadIdx.x / 32;
    if (piece >= (columns + 31) / 32) return;
    const int column = 32 * piece + threadIdx.x % 32;
    const float value = column < columns ? x[(u64)blockIdx.y * columns + column] : 0.0f;
    store_piece(to, blockIdx.y, piece, value);
}

// A block for each row; out may be x.
extern "C" __global__ void rms_norm(const float* x, const float* weight, float* out, int columns,
                                    float eps) {
    const float* row = x + (u64)blockIdx.x * columns;
    float squares = 0;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) squares = fmaf(row[i], row[i], squares);
    const float mean = __fdiv_rn(block_sum(squares), (float)columns);
    const float factor = __fdiv_rn(1.0f, __fsqrt_rn(mean + eps));
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        out[(u64)blockIdx.x * columns + i] = row[i] * factor * weight[i];
}

// x [rows, heads, head_dim] in place; grid (rows, heads), threads over the rotated pairs. The first
// row's position is start_at[0] if given, else start.
extern "C" __global__ void rope(float* x, const float* cosines, const float* sines,
                                const int* start_at, int start, int half, int head_dim) {
    const u64 position = (start_at ? *start_at : start) + blockIdx.x;
    float* head = x + ((u64)blockIdx.x * gridDim.y + blockIdx.y) * head_dim;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        const float c = cosines[position * half + i], s = sines[position * half + i];
        const float first = head[i], second = head[half + i];
        head[i] = first * c - second * s;
        head[half + i] = second * c + first * s;
    }
}

// rows [n, top_k, columns], weights [n, top_k], shared [n, columns] or null; grid (blocks, n).
extern "C" __global__ void weighted_sum(const float* rows, const float* weights,
                                        const float* shared, float* out, int top_k, int columns) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    const u64 token = blockIdx.y;
    const float* from = rows + token * top_k * columns + column;
    float total = from[0] * weights[token * top_k];
    for (int rank = 1; rank < top_k; ++rank)
        total += from[(u64)rank * columns] * weights[token * top_k + rank];
    out[token * columns + column] = shared ? total + shared[token * columns + column] : total;
}

// silu(gate) * up of `count` values.
extern "C" __global__ void silu_product(const float* gate, const float* up, float* out,
                                        long long count) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = __fdiv_rn(gate[i], 1.0f + expf(-gate[i])) * up[i];
}

// The same for rows [rows, columns], as floats, or in 8 bit where codes are wanted; grid (blocks of 8
// warps over the pieces, rows).
extern "C" __global__ void silu_rows(const float* gate, const float* up, int columns, float* out,
                                     const QuantisedRows to) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i / 32 * 32 >= columns) return;
    const u64 at = (u64)blockIdx.y * columns + i;
    float value = 0;
    if (i < columns) value = __fdiv_rn(gate[at], 1.0f + expf(-gate[at])) * up[at];
    if (to.codes) {
        store_piece(to, blockIdx.y, i / 32, value);
    } else if (i < columns) {
        out[at] = value;
    }
}
