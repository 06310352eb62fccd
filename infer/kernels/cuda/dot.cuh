// Products of matrix rows with inputs. Each half warp works on one row; its 16 lanes take the
// pieces of 32 weights in turn, so a row's sum is made in the same order whatever is computed beside
// it. Compiled without contraction: what is fused is written as fmaf.
//
// The bytes of a row pass through shared memory in chunks, two at a time: the next one is on its
// way while this one is decoded. Granules of 16 bytes are copied whatever the row's alignment; the
// skew of its first byte is kept.
#pragma once
#include "formats.cuh"
#include "inputs.cuh"

template <class F>
struct Chunk {
    static const int WEIGHTS = F::BLOCK_BYTES * 8 * 10 > F::BLOCK_WEIGHTS * 46 ? 1024 : 2048;
    static const int BLOCKS = WEIGHTS / F::BLOCK_WEIGHTS;
    static const int BYTES = F::IS_FLOAT ? 0 : BLOCKS * F::BLOCK_BYTES;
    // 16 for the skew, 16 to end on a granule.
    static const int STRIDE = F::IS_FLOAT ? 0 : (BYTES + 47) / 16 * 16;
    static const int WARP_BYTES = 4 * STRIDE;
};

__device__ inline void copy_granule(u8* to, const u8* from) {
#if __CUDA_ARCH__ >= 800
    const u32 shared = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
#else
    *(uint4*)to = *(const uint4*)from;
#endif
}

__device__ inline void close_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

__device__ inline void await_all_but_last_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
}

__device__ inline void await_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
}

template <class F>
__device__ inline void add_piece(const Piece& weights, const Inputs& x, int token, int piece,
                                 float& sum) {
#ifdef EXACT
    const float4* values = (const float4*)(x.values + (u64)token * x.columns + 32 * piece);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float4 four = values[i];
        sum = fmaf(weight<F>(weights, 4 * i), four.x, sum);
        sum = fmaf(weight<F>(weights, 4 * i + 1), four.y, sum);
        sum = fmaf(weight<F>(weights, 4 * i + 2), four.z, sum);
        sum = fmaf(weight<F>(weights, 4 * i + 3), four.w, sum);
    }
#else
    const int group = token * x.groups + piece / 16;
    const uint4* codes = x.codes + group * 32 + piece % 16;
    const Mark mark = x.marks[group * 16 + piece % 16];
    int dots[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint4 four = codes[16 * half];
        int dot = __dp4a((int)weights.codes[4 * half], (int)four.x, 0);
        dot = __dp4a((int)weights.codes[4 * half + 1], (int)four.y, dot);
        dot = __dp4a((int)weights.codes[4 * half + 2], (int)four.z, dot);
        dots[half] = __dp4a((int)weights.codes[4 * half + 3], (int)four.w, dot);
    }
    float part;
    if (F::ONE_SCALE) {
        part = weights.scale[0] * (float)(dots[0] + dots[1]);
    } else {
        part = fmaf(weights.scale[1], (float)dots[1], weights.scale[0] * (float)dots[0]);
    }
    if (F::OFFSET) {
        const int first = (short)(mark.sums & 0xffff), second = (short)(mark.sums >> 16);
        if (F::ONE_SCALE) {
            part = fmaf(weights.offset[0], (float)(first + second), part);
        } else {
            part = fmaf(weights.offset[0], (float)first, part);
            part = fmaf(weights.offset[1], (float)second, part);
        }
    }
    sum = fmaf(mark.scale, part, sum);
#endif
}

// The sum over a half warp, in every lane.
__device__ inline float half_warp_sum(float value) {
#pragma unroll
    for (int step = 8; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

struct Rows {
    const u8* matrix;
    int columns;
    int count;  // rows of the matrix
    int first;  // this half warp's first row; beyond `count` the last one is computed again
    int step;   // to its next row
    int passes;

    __device__ int row(int pass) const { return min(first + pass * step, count - 1); }
};

template <class F, bool IS_FLOAT>
struct RowDots;

template <class F>
struct RowDots<F, true> {
    // emit(pass, sums) is called by all lanes once a row is done; sums [TOKENS].
    template <int T, class Emit>
    static __device__ void run(const Rows& rows, const Inputs& x, const int (&tokens)[T], u8*,
                               const u32*, Emit emit) {
        const int lane = threadIdx.x % 16;
        for (int pass = 0; pass < rows.passes; ++pass) {
            const u8* row = rows.matrix + (u64)rows.row(pass) * rows.columns * F::BLOCK_BYTES;
            float sums[T] = {};
#pragma unroll 4
            for (int i = lane; i < rows.columns; i += 16) {
                const float w = F::value(row, i);
#pragma unroll
                for (int t = 0; t < T; ++t)
                    sums[t] = fmaf(w, x.values[(u64)tokens[t] * x.columns + i], sums[t]);
            }
#pragma unroll
            for (int t = 0; t < T; ++t) sums[t] = half_warp_sum(sums[t]);
            emit(pass, sums);
        }
    }
};

template <class F>
struct RowDots<F, false> {
    typedef Chunk<F> C;

    struct Position {
        int pass = 0, chunk = 0, stage = 0;
        __device__ void advance(int chunks) {
            stage ^= 1;
            if (++chunk == chunks) {
                chunk = 0;
                ++pass;
            }
        }
    };

    static __device__ const u8* source(const Rows& rows, const Position& at) {
        const int blocks = rows.columns / F::BLOCK_WEIGHTS;
        return rows.matrix + ((u64)rows.row(at.pass) * blocks + at.chunk * C::BLOCKS) *
                                 F::BLOCK_BYTES;
    }

    static __device__ void fetch(const Rows& rows, const Position& at, u8* buffer) {
        const int blocks = min(C::BLOCKS, rows.columns / F::BLOCK_WEIGHTS - at.chunk * C::BLOCKS);
        const u8* from = source(rows, at);
        const int skew = (int)((u64)from & 15);
        const int end = skew + blocks * F::BLOCK_BYTES;
        from -= skew;
        for (int i = threadIdx.x % 16 * 16; i < end; i += 256) copy_granule(buffer + i, from + i);
    }

    template <int T, class Emit>
    static __device__ void run(const Rows& rows, const Inputs& x, const int (&tokens)[T],
                               u8* buffer, const u32* grid, Emit emit) {
        const int lane = threadIdx.x % 16;
        const int chunks = (rows.columns + C::WEIGHTS - 1) / C::WEIGHTS;
        buffer += threadIdx.x % 32 / 16 * C::STRIDE;
        float sums[T] = {};
        Position next, now;
        fetch(rows, next, buffer);
        close_copies();
        while (now.pass < rows.passes) {
            next.advance(chunks);
            if (next.pass < rows.passes) fetch(rows, next, buffer + next.stage * 2 * C::STRIDE);
            close_copies();
            await_all_but_last_copies();
            __syncwarp();
            const u8* bytes =
                buffer + now.stage * 2 * C::STRIDE + ((u64)source(rows, now) & 15);
            const int first = now.chunk * (C::WEIGHTS / 32);
            const int pieces = min(C::WEIGHTS / 32, rows.columns / 32 - first);
            for (int p = lane; p < pieces; p += 16) {
                Piece piece;
                F::decode(bytes, p, grid, piece);
#pragma unroll
                for (int t = 0; t < T; ++t) add_piece<F>(piece, x, tokens[t], first + p, sums[t]);
            }
            __syncwarp();
            if (now.chunk == chunks - 1) {
#pragma unroll
                for (int t = 0; t < T; ++t) sums[t] = half_warp_sum(sums[t]);
                emit(now.pass, sums);
#pragma unroll
                for (int t = 0; t < T; ++t) sums[t] = 0;
            }
            now = next;
        }
    }
};

// The whole block calls this; `buffer` is this warp's, Chunk<F>::WARP_BYTES long.
template <class F, int T, class Emit>
__device__ inline void dot_rows(const Rows& rows, const Inputs& x, const int (&tokens)[T],
                                u8* buffer, const u32* grid, Emit emit) {
    RowDots<F, F::IS_FLOAT>::run(rows, x, tokens, buffer, grid, emit);
}
