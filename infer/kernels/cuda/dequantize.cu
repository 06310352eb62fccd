// Rows of a matrix as numbers: float, or bfloat16 where HALF_OUTPUT is set. A thread for 32 weights.
#include "formats.cuh"

#ifdef HALF_OUTPUT
typedef u16 Output;

__device__ inline Output output(float value) {
    const u32 bits = __float_as_uint(value);
    const u32 rounded = bits + 0x7fff + (bits >> 16 & 1);
    // A NaN's low bits could carry into the sign.
    return (u16)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : rounded >> 16);
}
#else
typedef float Output;

__device__ inline Output output(float value) { return value; }
#endif

// 16 bytes, written at once.
struct alignas(16) Granule {
    static const int COUNT = 16 / sizeof(Output);
    Output values[COUNT];
};

template <class F, bool IS_FLOAT>
struct Expand;

template <class F>
struct Expand<F, true> {
    static __device__ void run(const u8* row, int columns, int piece, const u32*, Output* out) {
        for (int j = 32 * piece; j < min(32 * piece + 32, columns); ++j)
            out[j] = output(F::value(row, j));
    }
};

template <class F>
struct Expand<F, false> {
    static __device__ void run(const u8* row, int, int index, const u32* grid, Output* out) {
        Piece piece;
        F::decode(row, index, grid, piece);
        Granule* to = (Granule*)(out + 32 * index);
#pragma unroll
        for (int i = 0; i < 32 / Granule::COUNT; ++i) {
            Granule granule;
#pragma unroll
            for (int j = 0; j < Granule::COUNT; ++j)
                granule.values[j] = output(weight<F>(piece, i * Granule::COUNT + j));
            to[i] = granule;
        }
    }
};

// out [count, columns]: row i is row ids[i], or first + i without ids.
extern "C" __global__ void dequantize(const u8* matrix, const long long* ids, long long first,
                                      int count, int columns, Output* out, const u32* grid_source) {
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
    Expand<FORMAT, FORMAT::IS_FLOAT>::run(bytes, columns, piece, grid, out + i * columns);
}
