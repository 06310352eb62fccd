// The "IQ" formats: groups of 4 or 8 codes out of a grid, signs apart. The grids lie in shared
// memory: of the 2-bit and 1-bit formats as nibbles that select from a few values (one word for 8
// codes), of the 3-bit formats as four codes a word. Behind a 2-bit grid lies a table of signs: for
// 7 stored bits (the eighth makes the number of minus signs even) or all 8, a word of nibbles, 4
// where the code is negative.
#pragma once
#include "formats_simple.cuh"

// The three levels of the 2-bit grids; behind them, their negatives.
#define IQ2_LEVELS 0x002b1908u
#define IQ2_NEGATIVES 0x00d5e7f8u

// Eight codes from a 2-bit grid: nibbles of the entry select the level, and nibbles of 4 from the
// table of signs turn the choice to its negative.
__device__ inline void iq2_codes(u32 entry, u32 signs, u32& first, u32& second) {
    const u32 selector = entry | signs;
    first = pick(IQ2_LEVELS, IQ2_NEGATIVES, selector);
    second = pick(IQ2_LEVELS, IQ2_NEGATIVES, selector >> 16);
}

__device__ inline float quarter_scale(float d, u32 nibble) {
    return d * (0.5f + (float)nibble) * 0.25f;
}

// d[2] then eight times: grid_index[4] signs_and_scale[4], four times 7 bits and 4 bits.
struct IQ2_XXS : Format<256, 66, true, false, 256 + 128> {
    static __device__ void decode(const u8* row, int piece, const u32* grid, Piece& out) {
        const u8* block = row + piece / PIECES * BLOCK_BYTES;
        u32 words[2];
        load_words(block + 2 + 8 * (piece % PIECES), words);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 signs = grid[256 + (words[1] >> 7 * i & 127)];
            iq2_codes(grid[words[0] >> 8 * i & 255], signs, out.codes[2 * i], out.codes[2 * i + 1]);
        }
        set_scale(out, quarter_scale(load_half(block), words[1] >> 28));
    }
};

// d[2] entries[64] scales[8]; an entry: grid index in 9 bits, 7 signs.
struct IQ2_XS : Format<256, 74, false, false, 512 + 128> {
    static __device__ void decode(const u8* row, int piece, const u32* grid, Piece& out) {
        const u8* block = row + piece / PIECES * BLOCK_BYTES;
        const int part = piece % PIECES;
        u32 words[2];
        load_words(block + 2 + 8 * part, words);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 entry = words[i / 2] >> 16 * (i % 2) & 0xffff;
            const u32 signs = grid[512 + (entry >> 9)];
            iq2_codes(grid[entry & 511], signs, out.codes[2 * i], out.codes[2 * i + 1]);
        }
        const float d = load_half(block);
        const u32 scales = block[66 + part];
        out.scale[0] = quarter_scale(d, scales & 15);
        out.scale[1] = quarter_scale(d, scales >> 4);
    }
};

// d[2] grid_index[32] signs[32] index_high[8] scales[8]; two more bits of each index.
struct IQ2_S : Format<256, 82, false, false, 1024 + 256> {
    static __device__ void decode(const u8* row, int piece, const u32* grid, Piece& out) {
        const u8* block = row + piece / PIECES * BLOCK_BYTES;
        const int part = piece % PIECES;
        const u32 index = load32_from_halves(block + 2 + 4 * part);
        const u32 signs = load32_from_halves(block + 34 + 4 * part);
        const u32 high = block[66 + part];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 entry = (index >> 8 * i & 255) | (high >> 2 * i & 3) << 8;
            const u32 eight = grid[1024 + (signs >> 8 * i & 255)];
            iq2_codes(grid[entry], eight, out.codes[2 * i], out.codes[2 * i + 1]);
        }
        const float d = load_half(block);
        const u32 scales = block[74 + part];
        out.scale[0] = quarter_scale(d, scales & 15);
        out.scale[1] = quarter_scale(d, scales >> 4);
    }
};

// d[2] grid_index[64] signs_and_scale[32]: a word for 32 weights, as in IQ2_XXS.
struct IQ3_XXS : Format<256, 98, true, false, 256> {
    static __device__ void decode(const u8* row, int piece, const u32* grid, Piece& out) {
        const u8* block = row + piece / PIECES * BLOCK_BYTES;
        const int part = piece % PIECES;
        u32 index[2];
        load_words(block + 2 + 8 * part, index);
        const u32 word = load32_from_halves(block + 66 + 4 * part);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 signs = with_parity(word >> 7 * (i / 2) & 127) >> 4 * (i % 2);
            out.codes[i] = apply_signs(grid[index[i / 4] >> 8 * (i % 4) & 255], signs);
        }
        set_scale(out, load_half(block) * (0.5f + (float)(word >> 28)) * 0.5f);
    }
};

// d[2] grid_index[64] index_high[8] signs[32] scales[4]; a ninth bit of each index.
struct IQ3_S : Format<256, 110, true, false, 512> {
    static __device__ void decode(const u8* row, int piece, const u32* grid, Piece& out) {
        const u8* block = row + piece / PIECES * BLOCK_BYTES;
        const int part = piece % PIECES;
        u32 index[2];
        load_words(block + 2 + 8 * part, index);
        const u32 high = block[66 + part];
        const u32 signs = load32_from_halves(block + 74 + 4 * part);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 entry = (index[i / 4] >> 8 * (i % 4) & 255) | (high >> i & 1) << 8;
            out.codes[i] = apply_signs(grid[entry], signs >> 4 * i);
        }
        const u32 scale = block[106 + part / 2] >> 4 * (part % 2) & 15;
        set_scale(out, load_half(block) * (float)(1 + 2 * scale));
    }
};

// Eight codes from the 1-bit grid: 8 g + 1 or 8 g - 1 for g in -1, 0, 1. The scale counts eighths.
__device__ inline void iq1_codes(u32 selector, u32 minus, u32& first, u32& second) {
    const u32 levels = minus ? 0x0007fff7u : 0x000901f9u;
    first = pick(levels, 0, selector);
    second = pick(levels, 0, selector >> 16);
}

// d[2] grid_index[32] high[16]; high, 16 bits for 32 weights: four times 3 more bits of an index, 3
// bits of scale, the sign of the eighth.
struct IQ1_S : Format<256, 50, true, false, 2048> {
    static __device__ void decode(const u8* row, int piece, const u32* grid, Piece& out) {
        const u8* block = row + piece / PIECES * BLOCK_BYTES;
        const int part = piece % PIECES;
        const u32 index = load32_from_halves(block + 2 + 4 * part);
        const u32 high = load16(block + 34 + 2 * part);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 entry = (index >> 8 * i & 255) | (high >> 3 * i & 7) << 8;
            iq1_codes(grid[entry], high >> 15, out.codes[2 * i], out.codes[2 * i + 1]);
        }
        set_scale(out, load_half(block) * (float)(2 * (high >> 12 & 7) + 1) * 0.125f);
    }
};

// grid_index[32] high[16] scales[8]; a nibble of high for 8 weights: 3 more bits of the index, the
// sign of the eighth. Four 16-bit words of scales: 3 bits for 16 weights each, and on top a nibble
// of d.
struct IQ1_M : Format<256, 56, false, false, 2048> {
    static __device__ void decode(const u8* row, int piece, const u32* grid, Piece& out) {
        const u8* block = row + piece / PIECES * BLOCK_BYTES;
        const int part = piece % PIECES;
        const u32 index = load32(block + 4 * part);
        const u32 high = load16(block + 32 + 2 * part);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 nibble = high >> 4 * i & 15;
            const u32 entry = (index >> 8 * i & 255) | (nibble & 7) << 8;
            iq1_codes(grid[entry], nibble >> 3, out.codes[2 * i], out.codes[2 * i + 1]);
        }
        const u32 low_pair = load32(block + 48), high_pair = load32(block + 52);
        const float d = half_value((low_pair >> 12 & 15) | (low_pair >> 24 & 0xf0) |
                                   (high_pair >> 4 & 0xf00) | (high_pair >> 16 & 0xf000));
        const u32 scales = (part < 4 ? low_pair : high_pair) >> (16 * (part / 2 % 2));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 scale = scales >> 3 * (part % 2 * 2 + i) & 7;
            out.scale[i] = d * (float)(2 * scale + 1) * 0.125f;
        }
    }
};
