"""Quantised products through ggml's functions, against float64 on gguf's dequantised weights.

Tolerances are relative to the root mean square of the result. Eight-bit activations are off by at
most half of 1/127 of their block's largest value: for normal values 0.6% (blocks of 32) to 0.8%
(blocks of 256) each, and as much in a sum of many.
"""

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_blocks import sound_blocks

from infer.kernels import ggml_library, reference
from infer.kernels.ggml_cpu import GgmlKernels
from infer.kernels.interface import ExpertBatch, ExpertFormat
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.scratch import KernelBounds
from shared.errors import ConfigError, UnsupportedModel
from shared.quants import GEOMETRY, TensorType, row_bytes

INT8_TOLERANCE = 0.01
# Two products in a row, of which the second sees the long-tailed products of the first.
INT8_SWIGLU_TOLERANCE = 0.03
HALF_TOLERANCE = 0.004
EXACT_TOLERANCE = 1e-5
D_MODEL, D_FF, EXPERTS, TOP_K, TOKENS = 512, 256, 6, 3, 9
BOUNDS = KernelBounds(
    tokens=64,
    columns=1024,
    expert_columns=D_FF,
    pairs=64 * TOP_K,
    experts=EXPERTS,
    heads=1,
    head_dim=1,
    context=1,
)
FLOAT_TYPES = ("F32", "F16", "BF16")
TYPES = (
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4", *FLOAT_TYPES),
)
LIBRARY_FOLDER = Path(importlib.util.find_spec("libggml").origin).parent


def quantised(name, rows, columns, seed=1):
    """A matrix of sound blocks in random order."""
    kind = TensorType[name]
    blocks = sound_blocks(kind)
    count = rows * columns // GEOMETRY[kind].block_weights
    return QuantMatrix.over(
        kind, columns, blocks[np.random.default_rng(seed).integers(0, len(blocks), count)]
    )


def inputs(rows, columns, seed=2):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def relative_error(result, expected):
    return ((result.double() - expected).norm() / expected.norm()).item()


def dense(matrix):
    return reference.dequantize(matrix).double()


def tolerance(name):
    if name == "F32":
        return EXACT_TOLERANCE
    return HALF_TOLERANCE if name in FLOAT_TYPES else INT8_TOLERANCE


@pytest.fixture(scope="module")
def kernels():
    return GgmlKernels(BOUNDS)


@pytest.fixture(scope="module", params=[1, 5])
def other_kernels(request):
    return GgmlKernels(BOUNDS, threads=request.param)


class TestTypes:
    @pytest.mark.parametrize("name", TYPES)
    def test_rows_are_bit_equal_to_ggufs(self, kernels, name):
        """Of random bytes: all codes, and scales that are infinite or NaN too."""
        kind = TensorType[name]
        noise = np.random.default_rng(3).integers(0, 256, (300, row_bytes(kind, 512)), np.uint8)
        matrix = QuantMatrix.over(kind, 512, noise)
        rows = kernels.embed(matrix, torch.arange(299, -1, -1)).numpy()[::-1]
        with np.errstate(all="ignore"):
            expected = gguf.quants.dequantize(noise, GGMLQuantizationType(kind))
        expected = expected.reshape(rows.shape).astype(np.float32)
        same_bits = rows.view(np.uint32) == expected.view(np.uint32)
        assert (same_bits | (np.isnan(rows) & np.isnan(expected))).all()

    @pytest.mark.parametrize("name", TYPES)
    def test_linear_is_within_tolerance(self, kernels, name):
        matrix = quantised(name, 70, 1024)
        x = inputs(TOKENS, 1024)
        expected = reference.linear(x.double(), dense(matrix))
        group = kernels.group([matrix])
        assert relative_error(kernels.linear(x, group)[0], expected) < tolerance(name)
        assert relative_error(kernels.linear(x, group, exact=True)[0], expected) < EXACT_TOLERANCE

    def test_integers_cannot_be_multiplied(self, kernels):
        matrix = QuantMatrix.over(TensorType.I32, 4, np.zeros((2, 4), np.int32))
        with pytest.raises(UnsupportedModel, match="I32"):
            kernels.group([matrix])


class TestLinear:
    def test_group_mixes_types_and_writes_where_it_is_told(self, kernels):
        names = ("Q6_K", "F32", "IQ4_NL", "Q5_1", "F16", "IQ2_XXS")
        matrices = [quantised(name, 3 + 40 * i, D_MODEL, i) for i, name in enumerate(names)]
        x = inputs(TOKENS, D_MODEL)
        out = [torch.full((TOKENS, matrix.rows), torch.nan) for matrix in matrices]
        assert kernels.linear(x, kernels.group(matrices), out=out) is out
        for matrix, name, result in zip(matrices, names, out, strict=True):
            expected = reference.linear(x.double(), dense(matrix))
            assert relative_error(result, expected) < tolerance(name)

    @pytest.mark.parametrize("exact", [False, True])
    def test_bits_depend_on_neither_batch_nor_group_nor_threads(
        self, kernels, other_kernels, exact
    ):
        matrices = [quantised(name, 90, D_MODEL) for name in ("IQ2_XXS", "Q4_K", "Q8_0", "F32")]
        x = inputs(TOKENS, D_MODEL)
        together = kernels.linear(x, kernels.group(matrices), exact)
        for matrix, expected in zip(matrices, together, strict=True):
            group = other_kernels.group([matrix])
            for size in (1, 2, 5, TOKENS):
                parts = [other_kernels.linear(part, group, exact)[0] for part in x.split(size)]
                assert torch.equal(torch.cat(parts), expected)


class Layer:
    """Some experts and a routing of TOKENS tokens to TOP_K of them each."""

    def __init__(self, gate="IQ2_XXS", up="Q4_K", down="Q2_K"):
        seeds = range(EXPERTS)
        self.format = ExpertFormat(*(TensorType[name] for name in (gate, up, down)), D_MODEL, D_FF)
        self.gate = [quantised(gate, D_FF, D_MODEL, seed) for seed in seeds]
        self.up = [quantised(up, D_FF, D_MODEL, seed + 10) for seed in seeds]
        self.down = [quantised(down, D_MODEL, D_FF, seed + 20) for seed in seeds]
        rng = np.random.default_rng(4)
        self.choice = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
        self.x = inputs(TOKENS, D_MODEL)

    def batch(self, pairs):
        """The pairs, sorted by expert."""
        chosen = self.choice.reshape(-1)[pairs]
        order = np.argsort(chosen, kind="stable")
        experts, starts = np.unique(chosen[order], return_index=True)
        return ExpertBatch(
            self.format,
            np.asarray(pairs, np.int32)[order],
            np.append(starts, len(pairs)).astype(np.int32),
            *(
                np.array([matrices[expert].address for expert in experts], np.int64)
                for matrices in (self.gate, self.up, self.down)
            ),
        )

    def run(self, kernels, exact, *batches):
        out = torch.full((TOKENS, TOP_K, D_MODEL), torch.nan)
        for pairs in batches:
            kernels.experts(self.x, self.batch(pairs), out, exact)
        return out

    def expected(self):
        out = torch.empty(TOKENS, TOP_K, D_MODEL, dtype=torch.float64)
        for token, rank in np.ndindex(TOKENS, TOP_K):
            expert = self.choice[token, rank]
            weights = (dense(part[expert]) for part in (self.gate, self.up, self.down))
            out[token, rank] = reference.swiglu(self.x[token : token + 1].double(), *weights)[0]
        return out


ALL_PAIRS = np.arange(TOKENS * TOP_K)


class TestExperts:
    @pytest.mark.parametrize(
        "types",
        [
            ("IQ2_XXS", "IQ2_XXS", "Q2_K"),
            ("Q4_K", "Q8_0", "IQ4_NL"),
            ("MXFP4", "F16", "Q6_K"),
            ("F32", "IQ1_M", "F32"),
        ],
    )
    def test_experts_are_within_tolerance(self, kernels, types):
        layer = Layer(*types)
        expected = layer.expected()
        result = layer.run(kernels, False, ALL_PAIRS)
        assert relative_error(result, expected) < INT8_SWIGLU_TOLERANCE
        result = layer.run(kernels, True, ALL_PAIRS)
        assert relative_error(result, expected) < EXACT_TOLERANCE

    @pytest.mark.parametrize("exact", [False, True])
    def test_bits_depend_on_neither_grouping_nor_threads(self, kernels, other_kernels, exact):
        layer = Layer()
        together = layer.run(kernels, exact, ALL_PAIRS)
        shuffled = np.random.default_rng(6).permutation(ALL_PAIRS)
        for batches in ([ALL_PAIRS], np.split(shuffled, [4, 5, 16]), ALL_PAIRS[:, None]):
            assert torch.equal(layer.run(other_kernels, exact, *batches), together)

    def test_only_the_rows_of_the_batch_are_written(self, kernels):
        out = Layer().run(kernels, False, np.array([4, 7]), np.array([], int))
        written = ~out.isnan().any(-1).reshape(-1)
        assert written.nonzero().flatten().tolist() == [4, 7]
        assert out[~written.view(TOKENS, TOP_K)].isnan().all()

    def test_an_expert_without_pairs_does_nothing(self, kernels):
        layer = Layer()
        batch = layer.batch(np.array([0, 1, 2]))
        starts = np.insert(batch.group_start, 1, batch.group_start[1])
        addresses = (np.insert(part, 1, 0) for part in (batch.gate, batch.up, batch.down))
        out = torch.full((TOKENS, TOP_K, D_MODEL), torch.nan)
        kernels.experts(layer.x, ExpertBatch(layer.format, batch.pairs, starts, *addresses), out)
        assert torch.equal(out[:1], layer.run(kernels, False, np.array([0, 1, 2]))[:1])

    def test_swiglu_is_one_expert_for_all_tokens(self, kernels):
        layer = Layer()
        together = layer.run(kernels, False, ALL_PAIRS)
        token, rank = 3, 1
        expert = layer.choice[token, rank]
        block = kernels.swiglu(layer.x, *(p[expert] for p in (layer.gate, layer.up, layer.down)))
        assert block.shape == (TOKENS, D_MODEL)
        assert torch.equal(block[token], together[token, rank])


class TestLibrary:
    features = ggml_library.host_features()

    def test_loads_here(self):
        library = ggml_library.GgmlLibrary(LIBRARY_FOLDER, self.features)
        assert library.version.startswith(ggml_library.SUPPORTED_VERSION)

    def test_missing_library_is_a_clear_error(self, tmp_path):
        with pytest.raises(ConfigError, match="cannot be loaded") as caught:
            ggml_library.GgmlLibrary(tmp_path, self.features)
        assert "libggml-python" in caught.value.remedy

    def test_other_version_is_refused(self, monkeypatch):
        monkeypatch.setattr(ggml_library, "SUPPORTED_VERSION", "0.99.")
        with pytest.raises(ConfigError, match=r"is not 0\.99"):
            ggml_library.GgmlLibrary(LIBRARY_FOLDER, self.features)

    def test_processor_without_the_needed_instructions_is_refused(self):
        with pytest.raises(ConfigError, match="this processor lacks"):
            ggml_library.GgmlLibrary(LIBRARY_FOLDER, {})

    @pytest.mark.parametrize("size", [-1.0, 0.5])
    def test_wrong_dot_product_is_noticed(self, monkeypatch, size):
        real = reference.dequantize
        monkeypatch.setattr(reference, "dequantize", lambda matrix: real(matrix) * size)
        with pytest.raises(ConfigError, match="is wrong"):
            ggml_library.GgmlLibrary(LIBRARY_FOLDER, self.features)
