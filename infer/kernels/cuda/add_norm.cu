// What a decode step does between the products: add to the residual stream, normalise, quantise.
//
// VALUES: numbers a thread holds; RANKS: weighted rows that are added, may be 0.
#include "inputs.cuh"
#include "sums.cuh"

// What is added to a row of the residual stream: `rows` [RANKS, columns], each times its weight and
// summed in order, then `plain` [columns] (or null).
struct Added {
    const float* rows;
    const float* weights;
    const float* plain;
};

// x [rows, columns] += added, and its norm: as floats, and in 8 bit where codes are wanted. A block
// for each row; the sums are those of weighted_sum and rms_norm.
extern "C" __global__ void add_norm(float* x, const Added added, const float* weight, float eps,
                                    int columns, float* normed, const QuantisedRows to) {
    const u64 row = blockIdx.x;
    x += row * columns;
    float values[VALUES];
    // All loads are issued before the first store.
#pragma unroll
    for (int k = 0; k < VALUES; ++k) {
        const int i = threadIdx.x + k * blockDim.x;
        values[k] = i < columns ? x[i] : 0.0f;
    }
#if RANKS
    float totals[VALUES];
    const float* from = added.rows + row * RANKS * columns;
#pragma unroll
    for (int k = 0; k < VALUES; ++k) {
        const int i = threadIdx.x + k * blockDim.x;
        float parts[RANKS];
#pragma unroll
        for (int rank = 0; rank < RANKS; ++rank)
            parts[rank] = i < columns ? from[rank * columns + i] : 0.0f;
        totals[k] = parts[0] * added.weights[row * RANKS];
#pragma unroll
        for (int rank = 1; rank < RANKS; ++rank)
            totals[k] += parts[rank] * added.weights[row * RANKS + rank];
    }
#pragma unroll
    for (int k = 0; k < VALUES; ++k) {
        const int i = threadIdx.x + k * blockDim.x;
        if (added.plain && i < columns) totals[k] += added.plain[row * columns + i];
        values[k] += totals[k];
    }
#else
#pragma unroll
    for (int k = 0; k < VALUES; ++k) {
        const int i = threadIdx.x + k * blockDim.x;
        if (added.plain && i < columns) values[k] += added.plain[row * columns + i];
    }
#endif
    float squares = 0;
#pragma unroll
    for (int k = 0; k < VALUES; ++k) {
        const int i = threadIdx.x + k * blockDim.x;
        if (i < columns) {
            x[i] = values[k];
            squares = fmaf(values[k], values[k], squares);
        }
    }
    const float mean = __fdiv_rn(block_sum(squares), (float)columns);
    const float factor = __fdiv_rn(1.0f, __fsqrt_rn(mean + eps));
#pragma unroll
    for (int k = 0; k < VALUES; ++k) {
        const int i = threadIdx.x + k * blockDim.x;
        const float value = i < columns ? values[k] * factor * weight[i] : 0.0f;
        if (i < columns) normed[row * columns + i] = value;
        // Whole warps take part: a piece lies in one warp.
        if (to.codes && i / 32 * 32 < columns) store_piece(to, row, i / 32, value);
    }
}
