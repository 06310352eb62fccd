// Integers, loads and byte tricks that the block formats are decoded with.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// 32 consecutive weights: weight j = scale[j / 16] * code_j (+ offset[j / 16]); code_j is byte j % 4
// of codes[j / 4], signed. Formats with one scale for all 32 set both.
struct Piece {
    u32 codes[8];
    float scale[2];
    float offset[2];
};

__device__ inline float half_value(u32 bits) {
    float value;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "r"(bits));
    return value;
}

__device__ inline u32 load16(const u8* at) { return *(const u16*)at; }
__device__ inline u32 load32(const u8* at) { return *(const u32*)at; }
__device__ inline float load_half(const u8* at) { return half_value(load16(at)); }

// Two 16-bit loads, for blocks whose length is not a multiple of 4.
__device__ inline u32 load32_from_halves(const u8* at) { return load16(at) | load16(at + 2) << 16; }

// N words from any address. Only aligned words that hold at least one of the bytes are read.
template <int N>
__device__ inline void load_words(const u8* at, u32 (&words)[N]) {
    const u32 skew = (u32)(u64)at & 3;
    const u32* aligned = (const u32*)(at - skew);
    u32 low = aligned[0];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const u32 high = i + 1 < N || skew ? aligned[i + 1] : 0;
        words[i] = __funnelshift_r(low, high, 8 * skew);
        low = high;
    }
}

// N words from an address that is a multiple of 4.
template <int N>
__device__ inline void load_aligned(const u8* at, u32 (&words)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) words[i] = ((const u32*)at)[i];
}

// Each byte of `bytes` (0..127) less the same byte of `less` (0..127), as signed bytes.
__device__ inline u32 subtract_bytes(u32 bytes, u32 less) {
    return ((bytes | 0x80808080u) - less) ^ 0x80808080u;
}

// Bits 0..3 to the lowest bits of bytes 0..3: no two of the shifted copies meet, so nothing carries.
__device__ inline u32 bits_to_bytes(u32 nibble) {
    return (nibble & 15) * 0x00204081u & 0x01010101u;
}

// Negate byte j of `values` (1..127 each) where bit j of `signs` is set.
__device__ inline u32 apply_signs(u32 values, u32 signs) {
    const u32 ones = bits_to_bytes(signs);
    return (values ^ ones * 255) + ones;
}

// The eighth sign makes the number of minus signs even.
__device__ inline u32 with_parity(u32 seven) {
    return seven | (__popc(seven) & 1) << 7;
}

// Four bytes of an eight-byte table by the low four nibbles of `selector`, each 0..7.
__device__ inline u32 pick(u32 table_low, u32 table_high, u32 selector) {
    return __byte_perm(table_low, table_high, selector);
}

// Sixteen-entry tables of signed bytes, four to a word.
struct Codebook {
    u32 words[4];
};

// The eight nibbles of `nibbles` through a table: low nibbles to `low`, high ones to `high`.
__device__ inline void look_up(const Codebook& book, u32 nibbles, u32& low, u32& high) {
    const u32 index = nibbles & 0x77777777u;
    const u32 upper = (nibbles & 0x88888888u) >> 1 | 0x32103210u;
    u32 mixed[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 first = __byte_perm(book.words[0], book.words[1], index >> 16 * i);
        const u32 second = __byte_perm(book.words[2], book.words[3], index >> 16 * i);
        mixed[i] = __byte_perm(first, second, upper >> 16 * i);
    }
    low = __byte_perm(mixed[0], mixed[1], 0x6420);
    high = __byte_perm(mixed[0], mixed[1], 0x7531);
}
