// The "K" formats: blocks of 256 weights with 4 to 8 bit scales of their own.
#pragma once
#include "formats_simple.cuh"

// scales[16] crumbs[64] d[2] dmin[2]; a scale byte: low nibble of d, high nibble of dmin.
// A byte of crumbs holds weights j, j + 32, j + 64, j + 96 of its half block.
struct Q2_K : Format<256, 84, false, true> {
    static __device__ void decode(const u8* row, int piece, const u32*, Piece& out) {
        const u8* block = row + piece / PIECES * BLOCK_BYTES;
        const int part = piece % PIECES;
        load_aligned(block + 16 + 32 * (part / 4), out.codes);
#pragma unroll
        for (int i = 0; i < 8; ++i) out.codes[i] = out.codes[i] >> 2 * (part % 4) & 0x03030303u;
        const u32 scales = load16(block + 2 * part);
        const u32 both = load32(block + 80);
        const float d = half_value(both & 0xffff), dmin = half_value(both >> 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            out.scale[i] = d * (float)(scales >> 8 * i & 15);
            out.offset[i] = -(dmin * (float)(scales >> (8 * i + 4) & 15));
        }
    }
};

// third_bits[32] crumbs[64] scales[12] d[2]; crumbs as in Q2_K, less 4 where the third bit is 0.
// scales: low nibbles in bytes 0..7 (of 0..7, then 8..15), upper 2 bits in bytes 8..11, less 32.
struct Q3_K : Format<256, 110, false, false> {
    static __device__ void decode(const u8* row, int piece, const u32*, Piece& out) {
        const u8* block = row + piece / PIECES * BLOCK_BYTES;
        const int part = piece % PIECES;
        u32 third[8];
        load_words(block, third);
        load_words(block + 32 + 32 * (part / 4), out.codes);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 low = out.codes[i] >> 2 * (part % 4) & 0x03030303u;
            const u32 high = (third[i] >> part & 0x01010101u) << 2;
            out.codes[i] = subtract_bytes(low | high, 0x04040404u);
        }
        const float d = load_half(block + 108);
        const u8* scales = block + 96;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int index = 2 * part + i;
            const u32 low = scales[index % 8] >> 4 * (index / 8) & 15;
            const u32 high = scales[8 + index % 4] >> 2 * (index / 4) & 3;
            out.scale[i] = d * (float)((int)(low | high << 4) - 32);
        }
    }
};

// d[2] dmin[2] scales[12] of a Q4_K or Q5_K block. Bytes 0..3 and 4..7 of the scales hold scale and
// minimum of parts 0..3 in 6 bits; bytes 8..11 the low nibbles of those of parts 4..7, whose upper 2
// bits are the top bits of bytes 0..3 and 4..7.
__device__ inline void k_scales(const u8* block, int part, Piece& out) {
    const u8* scales = block + 4;
    u32 scale, minimum;
    if (part < 4) {
        scale = scales[part] & 63;
        minimum = scales[part + 4] & 63;
    } else {
        const u32 low = scales[part + 4];
        scale = (low & 15) | (scales[part - 4] >> 2 & 0x30);
        minimum = low >> 4 | (scales[part] >> 2 & 0x30);
    }
    const u32 both = load32(block);
    set_scale(out, half_value(both & 0xffff) * (float)scale);
    set_offset(out, -(half_value(both >> 16) * (float)minimum));
}

// d[2] dmin[2] scales[12] nibbles[128]; of 64 weights the first 32 are the low nibbles.
struct Q4_K : Format<256, 144, true, true> {
    static __device__ void decode(const u8* row, int piece, const u32*, Piece& out) {
        const u8* block = row + piece / PIECES * BLOCK_BYTES;
        const int part = piece % PIECES;
        load_aligned(block + 16 + 32 * (part / 2), out.codes);
#pragma unroll
        for (int i = 0; i < 8; ++i) out.codes[i] = out.codes[i] >> 4 * (part % 2) & 0x0f0f0f0fu;
        k_scales(block, part, out);
    }
};

// d[2] dmin[2] scales[12] fifth_bits[32] nibbles[128]; bit p of fifth byte j belongs to part p.
struct Q5_K : Format<256, 176, true, true> {
    static __device__ void decode(const u8* row, int piece, const u32*, Piece& out) {
        const u8* block = row + piece / PIECES * BLOCK_BYTES;
        const int part = piece % PIECES;
        u32 fifth[8];
        load_aligned(block + 16, fifth);
        load_aligned(block + 48 + 32 * (part / 2), out.codes);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 low = out.codes[i] >> 4 * (part % 2) & 0x0f0f0f0fu;
            out.codes[i] = low | (fifth[i] >> part & 0x01010101u) << 4;
        }
        k_scales(block, part, out);
    }
};

// nibbles[128] crumbs[64] scales[16] d[2]. Of each half block's 64 bytes of nibbles, bytes 0..31 and
// 32..63 are parts 0 and 1 (low) and 2 and 3 (high); crumbs as in Q2_K; codes less 32.
struct Q6_K : Format<256, 210, false, false> {
    static __device__ void decode(const u8* row, int piece, const u32*, Piece& out) {
        const u8* block = row + piece / PIECES * BLOCK_BYTES;
        const int part = piece % PIECES, quarter = part % 4;
        u32 crumbs[8];
        load_words(block + 128 + 32 * (part / 4), crumbs);
        load_words(block + 64 * (part / 4) + 32 * (quarter % 2), out.codes);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 low = out.codes[i] >> 4 * (quarter / 2) & 0x0f0f0f0fu;
            const u32 high = (crumbs[i] >> 2 * quarter & 0x03030303u) << 4;
            out.codes[i] = subtract_bytes(low | high, 0x20202020u);
        }
        const float d = load_half(block + 208);
        const u32 scales = load16(block + 192 + 2 * part);
        out.scale[0] = d * (float)(signed char)(scales & 255);
        out.scale[1] = d * (float)(signed char)(scales >> 8);
    }
};
