"""Products on the GPU against float64 on gguf's dequantised weights."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from cuda_bench import (
    BOUNDS,
    D_MODEL,
    DENSE_TOLERANCE,
    EXACT_TOLERANCE,
    TOKENS,
    inputs,
    relative_error,
    tolerance,
)
from gguf import GGMLQuantizationType

from infer.kernels import reference
from infer.kernels.cuda.formats import FORMATS
from infer.kernels.cuda.kernels import CudaKernels
from infer.kernels.cuda.linear import DENSE_TOKENS
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.scratch import LatentBounds
from shared.quants import TensorType, row_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


class TestTypes:
    @pytest.mark.parametrize("name", FORMATS)
    def test_rows_are_bit_equal_to_ggufs(self, kernels, name):
        kind = TensorType[name]
        noise = np.random.default_rng(3).integers(0, 256, (300, row_bytes(kind, 512)), np.uint8)
        there = torch.from_numpy(noise).cuda()
        matrix = QuantMatrix(kind, 300, 512, there.data_ptr(), there)
        ids = torch.arange(299, -1, -1, device="cuda")
        rows = kernels.embed(matrix, ids).cpu().numpy()[::-1]
        with np.errstate(all="ignore"):
            expected = gguf.quants.dequantize(noise, GGMLQuantizationType(kind))
        expected = expected.reshape(rows.shape).astype(np.float32)
        same_bits = rows.view(np.uint32) == expected.view(np.uint32)
        assert (same_bits | (np.isnan(rows) & np.isnan(expected))).all()

    @pytest.mark.parametrize("name", FORMATS)
    @pytest.mark.parametrize("columns", [256, 2816])
    def test_linear_is_within_tolerance(self, kernels, upload, name, columns):
        weights = upload(name, 70, columns)
        x = inputs(TOKENS, columns)
        expected = reference.linear(x.cpu().double(), weights.dense)
        group = kernels.group([weights.matrix])
        assert relative_error(kernels.linear(x, group)[0], expected) < tolerance(name)
        exact = kernels.linear(x, group, exact=True)[0]
        assert relative_error(exact, expected) < EXACT_TOLERANCE

    @pytest.mark.parametrize("name", FORMATS)
    def test_many_tokens_are_within_tolerance(self, kernels, upload, name):
        weights = upload(name, 70, 512)
        x = inputs(DENSE_TOKENS + 1, 512)
        expected = reference.linear(x.cpu().double(), weights.dense)
        group = kernels.group([weights.matrix])
        assert relative_error(kernels.linear(x, group)[0], expected) < DENSE_TOLERANCE
        exact = kernels.linear(x, group, exact=True)[0]
        assert relative_error(exact, expected) < EXACT_TOLERANCE


class TestLinear:
    def test_group_mixes_types_and_writes_where_it_is_told(self, kernels, upload):
        names = ("Q6_K", "F32", "IQ4_NL", "Q6_K", "Q5_1", "F16", "IQ2_XXS")
        weights = [upload(name, 3 + 40 * i, D_MODEL, i) for i, name in enumerate(names)]
        x = inputs(TOKENS, D_MODEL)
        out = [torch.full((TOKENS, w.matrix.rows), torch.nan, device="cuda") for w in weights]
        group = kernels.group([w.matrix for w in weights])
        assert kernels.linear(x, group, out=out) is out
        for w, name, result in zip(weights, names, out, strict=True):
            expected = reference.linear(x.cpu().double(), w.dense)
            assert relative_error(result, expected) < tolerance(name)

    @pytest.mark.parametrize("exact", [False, True])
    def test_bits_depend_on_neither_batch_nor_group(self, kernels, upload, exact):
        names = ("IQ2_XXS", "Q2_K", "Q4_K", "Q8_0", "MXFP4", "F32", "BF16")
        matrices = [upload(name, 90, D_MODEL).matrix for name in names]
        x = inputs(TOKENS, D_MODEL)
        together = kernels.linear(x, kernels.group(matrices), exact)
        for matrix, expected in zip(matrices, together, strict=True):
            group = kernels.group([matrix])
            for size in (1, 2, 3, 5, 8):
                parts = [kernels.linear(part, group, exact)[0] for part in x.split(size)]
                assert torch.equal(torch.cat(parts), expected)

    @pytest.mark.parametrize("name", ["IQ2_XXS", "Q2_K", "Q8_0", "MXFP4", "Q6_K"])
    def test_rows_may_begin_anywhere(self, kernels, upload, name):
        """At any multiple of 4 bytes, and up to the end of the memory."""
        weights = upload(name, 40, 512)
        source = weights.matrix.keepalive.flatten()
        x = inputs(1, 512)
        expected = kernels.linear(x, kernels.group([weights.matrix]))[0]
        for shift in (4, 8, 12):
            moved = torch.empty(len(source) + shift, dtype=torch.uint8, device="cuda")
            moved[shift:] = source
            matrix = QuantMatrix(weights.matrix.type_id, 40, 512, moved.data_ptr() + shift, moved)
            assert torch.equal(kernels.linear(x, kernels.group([matrix]))[0], expected)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("name", "columns"), [("Q8_0", 192), ("Q4_0", 512), ("BF16", 64)])
def test_heads_for_few_tokens_and_for_many(kernels_of_heads, upload, name, columns, exact):
    heads, rows = 4, 40
    parts = [upload(name, rows, columns, seed) for seed in range(heads)]
    group = kernels_of_heads.heads([part.matrix for part in parts])
    limit = EXACT_TOLERANCE if exact else tolerance(name)
    for count in (1, 3, 12):
        x = inputs(count * heads, columns).view(count, heads, columns)
        result = kernels_of_heads.per_head(x, group, exact)
        for head, part in enumerate(parts):
            expected = x[:, head].cpu().double() @ part.dense.T
            assert relative_error(result[:, head], expected) < limit


@pytest.fixture(scope="module")
def kernels_of_heads():
    return CudaKernels(replace(BOUNDS, latent=LatentBounds(4, 512, 512, 1, 32, 4)))
