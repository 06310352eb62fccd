// Blocks of 32 (64, 256) weights with plain codes, and 16-entry codebooks.
//
// A format says: BLOCK_WEIGHTS, BLOCK_BYTES, ONE_SCALE (for all 32 weights of a piece), OFFSET
// (weights have one), TABLE_WORDS (of the lookup grid in shared memory) and decode(), which unpacks
// piece `piece` of the row that starts at `row`. Field offsets are those of ggml's structs; each is
// drawn as name[size in bytes].
#pragma once
#include "bits.cuh"

template <int WEIGHTS, int BYTES, bool SINGLE, bool WITH_OFFSET, int TABLE = 0>
struct Format {
    static const bool IS_FLOAT = false;
    static const int BLOCK_WEIGHTS = WEIGHTS;
    static const int BLOCK_BYTES = BYTES;
    static const bool ONE_SCALE = SINGLE;
    static const bool OFFSET = WITH_OFFSET;
    static const int TABLE_WORDS = TABLE;
    static const int PIECES = WEIGHTS / 32;
};

__device__ inline void set_scale(Piece& out, float scale) { out.scale[0] = out.scale[1] = scale; }
__device__ inline void set_offset(Piece& out, float offset) {
    out.offset[0] = out.offset[1] = offset;
}

// 16 bytes: low nibbles are weights 0..15, high nibbles weights 16..31.
__device__ inline void split_nibbles(const u32 (&words)[4], Piece& out) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        out.codes[i] = words[i] & 0x0f0f0f0fu;
        out.codes[i + 4] = words[i] >> 4 & 0x0f0f0f0fu;
    }
}

// d[2] nibbles[16]
struct Q4_0 : Format<32, 18, true, false> {
    static __device__ void decode(const u8* row, int piece, const u32*, Piece& out) {
        const u8* block = row + piece * BLOCK_BYTES;
        u32 words[4];
        load_words(block + 2, words);
        split_nibbles(words, out);
#pragma unroll
        for (int i = 0; i < 8; ++i) out.codes[i] = subtract_bytes(out.codes[i], 0x08080808u);
        set_scale(out, load_half(block));
    }
};

// d[2] m[2] nibbles[16]
struct Q4_1 : Format<32, 20, true, true> {
    static __device__ void decode(const u8* row, int piece, const u32*, Piece& out) {
        const u8* block = row + piece * BLOCK_BYTES;
        u32 words[4];
        load_aligned(block + 4, words);
        split_nibbles(words, out);
        set_scale(out, load_half(block));
        set_offset(out, load_half(block + 2));
    }
};

__device__ inline void add_fifth_bits(u32 bits, Piece& out) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out.codes[i] |= bits_to_bytes(bits >> 4 * i) << 4;
}

// d[2] fifth_bits[4] nibbles[16]
struct Q5_0 : Format<32, 22, true, false> {
    static __device__ void decode(const u8* row, int piece, const u32*, Piece& out) {
        const u8* block = row + piece * BLOCK_BYTES;
        u32 words[4];
        load_words(block + 6, words);
        split_nibbles(words, out);
        add_fifth_bits(load32_from_halves(block + 2), out);
#pragma unroll
        for (int i = 0; i < 8; ++i) out.codes[i] = subtract_bytes(out.codes[i], 0x10101010u);
        set_scale(out, load_half(block));
    }
};

// d[2] m[2] fifth_bits[4] nibbles[16]
struct Q5_1 : Format<32, 24, true, true> {
    static __device__ void decode(const u8* row, int piece, const u32*, Piece& out) {
        const u8* block = row + piece * BLOCK_BYTES;
        u32 words[4];
        load_aligned(block + 8, words);
        split_nibbles(words, out);
        add_fifth_bits(load32(block + 4), out);
        set_scale(out, load_half(block));
        set_offset(out, load_half(block + 2));
    }
};

// d[2] codes[32]
struct Q8_0 : Format<32, 34, true, false> {
    static __device__ void decode(const u8* row, int piece, const u32*, Piece& out) {
        const u8* block = row + piece * BLOCK_BYTES;
        load_words(block + 2, out.codes);
        set_scale(out, load_half(block));
    }
};

__device__ inline void split_codebook(const Codebook& book, const u32 (&words)[4], Piece& out) {
#pragma unroll
    for (int i = 0; i < 4; ++i) look_up(book, words[i], out.codes[i], out.codes[i + 4]);
}

// Entries 0..15: -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113.
__device__ inline Codebook non_linear_codes() {
    return {{0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u}};
}

// Twice the values of E2M1, entries 0..15: 0 1 2 3 4 6 8 12 and their negatives.
__device__ inline Codebook e2m1_codes() {
    return {{0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu}};
}

// d[2] nibbles[16]
struct IQ4_NL : Format<32, 18, true, false> {
    static __device__ void decode(const u8* row, int piece, const u32*, Piece& out) {
        const u8* block = row + piece * BLOCK_BYTES;
        u32 words[4];
        load_words(block + 2, words);
        split_codebook(non_linear_codes(), words, out);
        set_scale(out, load_half(block));
    }
};

// d[2] scale_high[2] scale_low[4] nibbles[128]; a scale has 6 bits, less 32.
struct IQ4_XS : Format<256, 136, true, false> {
    static __device__ void decode(const u8* row, int piece, const u32*, Piece& out) {
        const u8* block = row + piece / PIECES * BLOCK_BYTES;
        const int part = piece % PIECES;
        u32 words[4];
        load_aligned(block + 8 + 16 * part, words);
        split_codebook(non_linear_codes(), words, out);
        const u32 low = block[4 + part / 2] >> 4 * (part % 2) & 15;
        const u32 high = load16(block + 2) >> 2 * part & 3;
        set_scale(out, load_half(block) * (float)((int)(low | high << 4) - 32));
    }
};

// exponent[1] nibbles[16]; the scale is 2^(exponent - 128), which for 0 and 1 is subnormal.
struct MXFP4 : Format<32, 17, true, false> {
    static __device__ void decode(const u8* row, int piece, const u32*, Piece& out) {
        const u8* block = row + piece * BLOCK_BYTES;
        u32 words[4];
        load_words(block + 1, words);
        split_codebook(e2m1_codes(), words, out);
        const u32 exponent = block[0];
        set_scale(
            out, __uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23));
    }
};

// Half of an unsigned E4M3 (bias 7); 0x7f stands for 0.
__device__ inline float half_e4m3(u32 bits) {
    const u32 exponent = bits >> 3 & 15, mantissa = bits & 7;
    if (bits == 0x7f) return 0.0f;
    if (exponent == 0) return (float)mantissa * 0x1p-10f;
    return __uint_as_float((exponent + 119) << 23 | mantissa << 20);
}

// scale[4] then four times nibbles[8]: of 16 weights, the first 8 are the low nibbles.
struct NVFP4 : Format<64, 36, false, false> {
    static __device__ void decode(const u8* row, int piece, const u32*, Piece& out) {
        const u8* block = row + piece / PIECES * BLOCK_BYTES;
        const int part = piece % PIECES;
        const Codebook book = e2m1_codes();
        u32 words[4];
        load_aligned(block + 4 + 16 * part, words);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            look_up(book, words[2 * i], out.codes[4 * i], out.codes[4 * i + 2]);
            look_up(book, words[2 * i + 1], out.codes[4 * i + 1], out.codes[4 * i + 3]);
            out.scale[i] = half_e4m3(block[2 * part + i]);
        }
    }
};

// crumbs[64] d[2]; a byte holds weights j, j + 32, j + 64, j + 96.
struct TQ2_0 : Format<256, 66, true, false> {
    static __device__ void decode(const u8* row, int piece, const u32*, Piece& out) {
        const u8* block = row + piece / PIECES * BLOCK_BYTES;
        const int part = piece % PIECES;
        load_words(block + 32 * (part / 4), out.codes);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 crumbs = out.codes[i] >> 2 * (part % 4) & 0x03030303u;
            out.codes[i] = subtract_bytes(crumbs, 0x01010101u);
        }
        set_scale(out, load_half(block + 64));
    }
};

// fives[48] fours[4] d[2]: digits to base 3 as a fraction of 256, the highest first.
// Weights 0..159 are the digits of bytes 0..31, 160..239 of bytes 32..47, 240..255 of 48..51.
struct TQ1_0 : Format<256, 54, true, false> {
    static __device__ u32 digit(u32 byte, int place) {
        const u32 power = (u32)(0x511b090301ull >> 8 * place) & 255;
        return (byte * power & 255) * 3 >> 8;
    }
    static __device__ u32 weight(const u8* block, int index) {
        if (index < 160) return digit(block[index % 32], index / 32);
        index -= 160;
        if (index < 80) return digit(block[32 + index % 16], index / 16);
        index -= 80;
        return digit(block[48 + index % 4], index / 4);
    }
    static __device__ void decode(const u8* row, int piece, const u32*, Piece& out) {
        const u8* block = row + piece / PIECES * BLOCK_BYTES;
        const int first = piece % PIECES * 32;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            u32 codes = 0;
            for (int j = 0; j < 4; ++j) codes |= weight(block, first + 4 * i + j) << 8 * j;
            out.codes[i] = subtract_bytes(codes, 0x01010101u);
        }
        set_scale(out, load_half(block + 52));
    }
};
