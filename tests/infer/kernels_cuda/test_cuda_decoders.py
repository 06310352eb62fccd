"""The block decoders of the CUDA sources, built for the processor and compared with gguf's.

Nothing of this needs a GPU: a few of CUDA's functions are written out in C++ for the purpose.
"""

import ctypes
import shutil
import subprocess

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from infer.kernels.cuda.formats import FORMATS, grid_words
from infer.kernels.cuda.sources import FOLDER
from shared.quants import TensorType, row_bytes

COLUMNS = 512
ROWS = 200
SHIM = r"""
#include <algorithm>
#include <cstdint>
#include <cstring>
using std::min;
#define __device__
#define __global__
#define __shared__ static
#define asm(...) value = half_to_float(bits)
struct Dim { int x, y, z; };
static Dim threadIdx, blockIdx, blockDim;
static void __syncthreads() {}
static unsigned __float_as_uint(float v) { unsigned b; memcpy(&b, &v, 4); return b; }
static float __uint_as_float(unsigned b) { float v; memcpy(&v, &b, 4); return v; }
static int __popc(unsigned v) { return __builtin_popcount(v); }
static float half_to_float(unsigned bits) {
    _Float16 half; uint16_t low = bits; memcpy(&half, &low, 2); return half;
}
static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return ((uint64_t)high << 32 | low) >> (shift & 31);
}
static unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    uint64_t bytes = (uint64_t)high << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        unsigned nibble = selector >> 4 * i & 15;
        unsigned byte = bytes >> 8 * (nibble & 7) & 255;
        if (nibble & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << 8 * i;
    }
    return result;
}
#include "dequantize.cu"
extern "C" void expand(const u8* matrix, const long long* ids, int count, int columns, void* out,
                       const u32* grid) {
    blockDim.x = 1;
    for (blockIdx.x = 0; blockIdx.x < count * ((columns + 31) / 32); ++blockIdx.x)
        dequantize(matrix, ids, 0, count, columns, (Output*)out, grid);
}
"""


@pytest.fixture(scope="module")
def compiler():
    found = shutil.which("g++")
    if found is None:
        pytest.skip("there is no C++ compiler")
    return found


def build(compiler, folder, name, *options):
    source, library = folder / "decoder.cpp", folder / "decoder.so"
    source.write_text(SHIM)
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-ffp-contract=off"]
    command = [compiler, *flags, f"-I{FOLDER}", f"-DFORMAT={name}", *options]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library)).expand


def expand(function, noise, ids, out):
    grid = grid_words(out[0])
    pointers = (noise, ids, out[1], np.zeros(1, np.uint32) if grid is None else grid)
    at = [array.ctypes.data_as(ctypes.c_void_p) for array in pointers]
    function(at[0], at[1], len(ids), COLUMNS, at[2], at[3])
    return out[1]


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_bit_equal_to_ggufs(compiler, tmp_path, name):
    """Of random bytes: all codes, and scales that are infinite or NaN too."""
    kind = TensorType[name]
    size = (ROWS, row_bytes(kind, COLUMNS))
    noise = np.random.default_rng(3).integers(0, 256, size, np.uint8)
    ids = np.arange(ROWS - 1, -1, -1)
    out = np.full((ROWS, COLUMNS), np.nan, np.float32)
    rows = expand(build(compiler, tmp_path, name), noise, ids, (name, out))[::-1]
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(noise, GGMLQuantizationType(kind))
    expected = expected.reshape(rows.shape).astype(np.float32)
    same_bits = rows.view(np.uint32) == expected.view(np.uint32)
    assert (same_bits | (np.isnan(rows) & np.isnan(expected))).all()


def test_bfloat16_is_rounded_to_even(compiler, tmp_path):
    values = np.random.default_rng(4).integers(0, 2**32, (ROWS, COLUMNS), np.uint32)
    out = np.zeros((ROWS, COLUMNS), np.uint16)
    function = build(compiler, tmp_path, "F32", "-DHALF_OUTPUT=1")
    rows = expand(function, values, np.arange(ROWS), ("F32", out))
    floats = values.view(np.float32)
    expected = gguf.quants.quantize(floats, GGMLQuantizationType.BF16).view(np.uint16)
    assert ((rows == expected) | np.isnan(floats)).all()
    assert np.isnan((rows.astype(np.uint32) << 16).view(np.float32)[np.isnan(floats)]).all()
