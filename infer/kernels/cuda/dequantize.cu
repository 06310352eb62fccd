// Rows of a matrix as numbers: float, or bfloat16 where HALF_OUTPUT is set. A thread for 32 weights.
#include "formats.cuh"

__device__ inline void store(void* out, u64 at, float value) {
#ifdef HALF_OUTPUT
    const u32 bits = __float_as_uint(value);
    const u32 rounded = bits + 0x7fff + (bits >> 16 & 1);
    // A NaN's low bits could carry into the sign.
    ((u16*)out)[at] = (u16)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : rounded >> 16);
#else
    ((float*)out)[at] = value;
#endif
}

template <class F, bool IS_FLOAT>
struct Expand;

template <class F>
struct Expand<F, true> {
    static __device__ void run(const u8* row, int columns, int piece, const u32*, void* out,
                               u64 at) {
        for (int j = 32 * piece; j < min(32 * piece + 32, columns); ++j)
            store(out, at + j, F::value(row, j));
    }
};

template <class F>
struct Expand<F, false> {
    static __device__ void run(const u8* row, int, int index, const u32* grid, void* out, u64 at) {
        Piece piece;
        F::decode(row, index, grid, piece);
#pragma unroll
        for (int j = 0; j < 32; ++j) store(out, at + 32 * index + j, weight<F>(piece, j));
    }
};

// out [count, columns]: row i is row ids[i], or first + i without ids.
extern "C" __global__ void dequantize(const u8* matrix, const long long* ids, long long first,
                                      int count, int columns, void* out, const u32* grid_source) {
    __shared__ u32 grid[FORMAT::TABLE_WORDS + 1];
    load_grid<FORMAT>(grid_source, grid);
    __syncthreads();
    const int pieces = (columns + 31) / 32;
    const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= (u64)count * pieces) return;
    const int piece = (int)(index % pieces);
    const u64 i = index / pieces;
    const u64 row = ids ? ids[i] : first + i;
    const u8* bytes = matrix + row * (columns / FORMAT::BLOCK_WEIGHTS) * FORMAT::BLOCK_BYTES;
    Expand<FORMAT, FORMAT::IS_FLOAT>::run(bytes, columns, piece, grid, out, i * columns);
}
