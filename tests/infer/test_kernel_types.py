"""Experts of every type that they come in: as far from float64 as eight-bit activations are.

The oracle rounds activations to eight bits itself, by the formats' definitions, and does all else
in float64: 32 values share the scale amax / 127 (Q8_0, Q8_1), or 256 the scale max / -127 (Q8_K).
"""

import numpy as np
import pytest
import torch
from gguf_blocks import random_blocks

from infer.kernels import reference
from infer.kernels.ggml_cpu import GgmlKernels
from infer.kernels.interface import ExpertBatch, ExpertFormat
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.scratch import KernelBounds
from infer.kernels.tiled_matmul import TiledMatmul
from shared.quants import TensorType

SMALL_BLOCKS = ("IQ4_NL", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "NVFP4")
LARGE_BLOCKS = (
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
HALF_TYPES = ("F16", "BF16")
D_MODEL, D_FF, EXPERTS, TOKENS = 512, 256, 2, 24
SAME_ERROR = (
    0.03  # relative: sums are made in float32, and some formats keep a sum in half precision
)
HALF_ERROR = {"F16": 0.001, "BF16": 0.01}


class Experts:
    """Two experts of a type, each for every token."""

    def __init__(self, name):
        kind, rng = TensorType[name], np.random.default_rng(int(TensorType[name]))

        def matrices(rows, columns):
            return [
                QuantMatrix.over(kind, columns, random_blocks(rng, kind, rows, columns))
                for _ in range(EXPERTS)
            ]

        self.gate, self.up = matrices(D_FF, D_MODEL), matrices(D_FF, D_MODEL)
        self.down = matrices(D_MODEL, D_FF)
        pairs = np.arange(TOKENS * EXPERTS, dtype=np.int32).reshape(TOKENS, EXPERTS)
        self.batch = ExpertBatch(
            ExpertFormat(kind, kind, kind, D_MODEL, D_FF),
            np.ascontiguousarray(pairs.T).reshape(-1),
            np.arange(EXPERTS + 1, dtype=np.int32) * TOKENS,
            *(np.array([m.address for m in p], np.int64) for p in (self.gate, self.up, self.down)),
        )
        self.x = torch.from_numpy(rng.standard_normal((TOKENS, D_MODEL), np.float32))

    def expected(self, rounded):
        """float64 [tokens, experts, d_model]; `rounded` is what becomes of activations."""
        x, out = rounded(self.x.double()), []
        for matrices in zip(self.gate, self.up, self.down, strict=True):
            gate, up, down = (reference.dequantize(matrix).double() for matrix in matrices)
            gated = x @ gate.T
            out.append(rounded(gated * torch.sigmoid(gated) * (x @ up.T)) @ down.T)
        return torch.stack(out, 1)


def unrounded(x):
    return x


def rounded_in_blocks_of(size):
    """To eight bits, as ggml's Q8_0 and Q8_1 (32) or Q8_K (256) do."""

    def rounded(x):
        blocks = x.reshape(-1, size)
        scale = blocks.abs().amax(1, keepdim=True) / 127
        if size == 32:
            scale = scale.half().double()
        return ((blocks / scale).round().clamp(-128, 127) * scale).reshape(x.shape)

    return rounded


def error(result, expected):
    return ((result.double() - expected).norm() / expected.norm()).item()


@pytest.fixture(scope="module")
def kernels():
    bounds = KernelBounds(TOKENS, D_MODEL, D_FF, TOKENS * EXPERTS, EXPERTS, 1, 1, 1)
    return GgmlKernels(bounds, threads=2, tiles=False)


def computed(kernels, experts):
    return kernels.experts(experts.x, experts.batch, torch.empty(TOKENS, EXPERTS, D_MODEL))


@pytest.mark.parametrize("name", [*SMALL_BLOCKS, *LARGE_BLOCKS])
def test_error_is_that_of_eight_bit_activations(kernels, name):
    experts = Experts(name)
    exactly = experts.expected(unrounded)
    rounded = experts.expected(rounded_in_blocks_of(32 if name in SMALL_BLOCKS else 256))
    own, formats = error(computed(kernels, experts), exactly), error(rounded, exactly)
    assert own == pytest.approx(formats, rel=SAME_ERROR)


@pytest.mark.parametrize("name", HALF_TYPES)
def test_half_precision_loses_less(kernels, name):
    experts = Experts(name)
    assert error(computed(kernels, experts), experts.expected(unrounded)) < HALF_ERROR[name]


@pytest.mark.parametrize("name", [*SMALL_BLOCKS, *LARGE_BLOCKS, "BF16"])
def test_tiles_lose_less_than_eight_bit_activations(kernels, name):
    """What many tokens are computed by, here for few."""
    experts, out = Experts(name), torch.empty(TOKENS, EXPERTS, D_MODEL)
    TiledMatmul(kernels.library, 2, enabled=True).experts(experts.x, experts.batch, out)
    exactly = experts.expected(unrounded)
    eight_bit = experts.expected(rounded_in_blocks_of(32))
    assert error(out, exactly) < error(eight_bit, exactly)
