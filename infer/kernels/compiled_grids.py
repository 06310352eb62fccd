"""To float for the types whose weights are looked up in a grid, eight at a time.

ggml's functions go weight by weight there, 0.3 Gweights/s a core; these are vector code. The result
has the same bits. Blocks are of 256 weights, in eight groups of 32 (gguf's quants.py):

    IQ2_XXS  d f16 | a group: 4 grid indices of 8 bits; 4 x 7 sign bits, scale in the upper 4
    IQ2_XS   d f16 | 32 x u16: grid index 9, sign 7 | scales, 4 bits for 16 weights
    IQ2_S    d f16 | 32 x low 8 of the index | 32 x 8 signs | 8 x high bits of 4 | scales likewise
    IQ3_XXS  d f16 | 64 grid indices of 8 bits, of 4 weights each | a group: 4 x 7 signs, scale 4
    IQ3_S    d f16 | 64 x low 8 of the index | 8 x high bits of eight | 32 x 8 signs | 4 scales
"""

import numpy as np
from gguf import quants
from numba import carray

from infer.kernels.numba_cache import converter, inner
from infer.kernels.numba_calls import at
from shared.quants import GEOMETRY, TensorType

_BLOCK = 256


def _grid(kind: type) -> np.ndarray:
    kind.init_grid()
    return np.ascontiguousarray(kind.grid, np.float32).reshape(-1)


_GRID_2XXS, _GRID_2XS, _GRID_2S = (
    _grid(kind) for kind in (quants.IQ2_XXS, quants.IQ2_XS, quants.IQ2_S)
)
_GRID_3XXS, _GRID_3S = (_grid(kind) for kind in (quants.IQ3_XXS, quants.IQ3_S))
# For each byte of sign bits eight factors; seven bits stand for eight, of which the last makes the
# number of minus signs even.
_SIGNS = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, -1, 1).astype(np.float32).reshape(-1)
_EVEN_SIGNS = _SIGNS.reshape(-1, 8)[np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)].reshape(-1)
_SIZES = {kind: GEOMETRY[kind].block_bytes for kind in TensorType if kind in GEOMETRY}
_BYTES_2XXS, _BYTES_2XS = _SIZES[TensorType.IQ2_XXS], _SIZES[TensorType.IQ2_XS]
_BYTES_2S, _BYTES_3XXS = _SIZES[TensorType.IQ2_S], _SIZES[TensorType.IQ3_XXS]
_BYTES_3S = _SIZES[TensorType.IQ3_S]
_TWO_TO_112 = np.float32(2.0**112)
_HALF, _QUARTER = np.float32(0.5), np.float32(0.25)


@inner
def _scale(block):
    """The float16 that a block begins with."""
    bits = np.int32(block[0]) | np.int32(block[1]) << 8
    magnitude = np.int32((bits & 0x7FFF) << 13)
    # The exponent's other bias is a factor, which does for subnormal numbers too.
    value = magnitude.view(np.float32) * _TWO_TO_112
    if bits & 0x7C00 == 0x7C00:
        value = np.int32(magnitude | 0x7F800000).view(np.float32)
    return -value if bits & 0x8000 else value


@inner
def _word(block, first):
    """32 bits."""
    low = np.int64(block[first]) | np.int64(block[first + 1]) << 8
    return low | np.int64(block[first + 2]) << 16 | np.int64(block[first + 3]) << 24


@inner
def _write_eight(out, first, scale, grid, entry, signs, sign):
    for i in range(8):
        out[first + i] = scale * grid[8 * entry + i] * signs[8 * sign + i]


@inner
def _write_fours(out, first, scale, grid, entry, next_entry, signs, sign):
    for i in range(4):
        out[first + i] = scale * grid[4 * entry + i] * signs[8 * sign + i]
    for i in range(4):
        out[first + 4 + i] = scale * grid[4 * next_entry + i] * signs[8 * sign + 4 + i]


@converter
def _iq2_xxs(source, target, count):
    for number in range(count // _BLOCK):
        block = carray(at(source + number * _BYTES_2XXS), _BYTES_2XXS, np.uint8)
        out = carray(at(target + number * _BLOCK * 4), _BLOCK, np.float32)
        d = _scale(block)
        for group in range(8):
            place = 2 + 8 * group
            word = _word(block, place + 4)
            scale = d * (_HALF + np.float32(word >> 28)) * _QUARTER
            for i in range(4):
                sign = word >> 7 * i & 127
                entry = np.int64(block[place + i])
                _write_eight(out, 32 * group + 8 * i, scale, _GRID_2XXS, entry, _EVEN_SIGNS, sign)


@converter
def _iq2_xs(source, target, count):
    for number in range(count // _BLOCK):
        block = carray(at(source + number * _BYTES_2XS), _BYTES_2XS, np.uint8)
        out = carray(at(target + number * _BLOCK * 4), _BLOCK, np.float32)
        d = _scale(block)
        for i in range(32):
            scales = np.int64(block[66 + i // 4]) >> 4 * (i // 2 % 2) & 15
            scale = d * (_HALF + np.float32(scales)) * _QUARTER
            index = np.int64(block[2 + 2 * i]) | np.int64(block[3 + 2 * i]) << 8
            _write_eight(out, 8 * i, scale, _GRID_2XS, index & 511, _EVEN_SIGNS, index >> 9)


@converter
def _iq2_s(source, target, count):
    for number in range(count // _BLOCK):
        block = carray(at(source + number * _BYTES_2S), _BYTES_2S, np.uint8)
        out = carray(at(target + number * _BLOCK * 4), _BLOCK, np.float32)
        d = _scale(block)
        for i in range(32):
            scales = np.int64(block[74 + i // 4]) >> 4 * (i // 2 % 2) & 15
            scale = d * (_HALF + np.float32(scales)) * _QUARTER
            high = np.int64(block[66 + i // 4]) >> 2 * (i % 4) & 3
            entry, sign = np.int64(block[2 + i]) | high << 8, np.int64(block[34 + i])
            _write_eight(out, 8 * i, scale, _GRID_2S, entry, _SIGNS, sign)


@converter
def _iq3_xxs(source, target, count):
    for number in range(count // _BLOCK):
        block = carray(at(source + number * _BYTES_3XXS), _BYTES_3XXS, np.uint8)
        out = carray(at(target + number * _BLOCK * 4), _BLOCK, np.float32)
        d = _scale(block)
        for group in range(8):
            word = _word(block, 66 + 4 * group)
            scale = d * (_HALF + np.float32(word >> 28)) * _HALF
            for i in range(4):
                first = 32 * group + 8 * i
                one = np.int64(block[2 + first // 4])
                two = np.int64(block[3 + first // 4])
                sign = word >> 7 * i & 127
                _write_fours(out, first, scale, _GRID_3XXS, one, two, _EVEN_SIGNS, sign)


@converter
def _iq3_s(source, target, count):
    for number in range(count // _BLOCK):
        block = carray(at(source + number * _BYTES_3S), _BYTES_3S, np.uint8)
        out = carray(at(target + number * _BLOCK * 4), _BLOCK, np.float32)
        d = _scale(block)
        for i in range(32):
            scales = np.int64(block[106 + i // 8]) >> 4 * (i // 4 % 2) & 15
            scale = d * np.float32(1 + 2 * scales)
            high = np.int64(block[66 + i // 4]) >> 2 * (i % 4)
            one = np.int64(block[2 + 2 * i]) | (high & 1) << 8
            two = np.int64(block[3 + 2 * i]) | (high >> 1 & 1) << 8
            sign = np.int64(block[74 + i])
            _write_fours(out, 8 * i, scale, _GRID_3S, one, two, _SIGNS, sign)


# Addresses of to_float functions by type
TO_FLOAT: dict[int, int] = {
    int(TensorType.IQ2_XXS): _iq2_xxs,
    int(TensorType.IQ2_XS): _iq2_xs,
    int(TensorType.IQ2_S): _iq2_s,
    int(TensorType.IQ3_XXS): _iq3_xxs,
    int(TensorType.IQ3_S): _iq3_s,
}
