"""Products on the GPU against float64 on gguf's dequantised weights.

Tolerances are relative to the norm of the result. Eight-bit activations are off by at most half of
1/127 of their block's largest value: for normal values 0.6% each, and as much in a sum of many.
"""

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from infer.kernels import reference
from infer.kernels.cuda import experts as cuda_experts
from infer.kernels.cuda.formats import CODED_FORMATS, FLOAT_FORMATS, FORMATS
from infer.kernels.cuda.kernels import CudaKernels
from infer.kernels.cuda.linear import DENSE_TOKENS
from infer.kernels.interface import ExpertBatch, ExpertFormat
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.scratch import KernelBounds, LatentBounds
from shared.quants import TensorType, row_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

INT8_TOLERANCE = 0.01
# Two products in a row, of which the second sees the long-tailed products of the first.
INT8_SWIGLU_TOLERANCE = 0.03
DENSE_TOLERANCE = 0.01
EXACT_TOLERANCE = 1e-5
D_MODEL, D_FF, EXPERTS, TOP_K, TOKENS = 512, 256, 6, 3, 9
BOUNDS = KernelBounds(
    tokens=256,
    columns=2816,
    expert_columns=1536,
    pairs=256 * TOP_K,
    experts=EXPERTS,
    heads=1,
    head_dim=1,
    context=1,
)


@pytest.fixture(scope="module")
def kernels():
    return CudaKernels(BOUNDS)


def inputs(rows, columns, seed=2):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).cuda()


def relative_error(result, expected):
    return ((result.cpu().double() - expected).norm() / expected.norm()).item()


def tolerance(name):
    return EXACT_TOLERANCE if name in FLOAT_FORMATS else INT8_TOLERANCE


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


class Layer:
    """Some experts and a routing of some tokens to TOP_K of them each."""

    def __init__(
        self, upload, gate="IQ2_XXS", up="Q4_K", down="Q2_K", tokens=TOKENS, widths=(D_MODEL, D_FF)
    ):
        seeds = range(EXPERTS)
        self.d_model, d_ff = widths
        types = (TensorType[name] for name in (gate, up, down))
        self.format = ExpertFormat(*types, self.d_model, d_ff)
        self.parts = (
            [upload(gate, d_ff, self.d_model, seed) for seed in seeds],
            [upload(up, d_ff, self.d_model, seed + 10) for seed in seeds],
            [upload(down, self.d_model, d_ff, seed + 20) for seed in seeds],
        )
        rng = np.random.default_rng(4)
        self.choice = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)])
        self.x = inputs(tokens, self.d_model)

    def batch(self, pairs):
        """The pairs, sorted by expert."""
        chosen = self.choice.reshape(-1)[pairs]
        order = np.argsort(chosen, kind="stable")
        experts, starts = np.unique(chosen[order], return_index=True)
        return ExpertBatch(
            self.format,
            np.asarray(pairs, np.int32)[order],
            np.append(starts, len(pairs)).astype(np.int32),
            *(np.array([part[e].matrix.address for e in experts], np.int64) for part in self.parts),
        )

    def out(self):
        return torch.full((*self.choice.shape, self.d_model), torch.nan, device="cuda")

    def run(self, kernels, exact, *batches):
        out = self.out()
        for pairs in batches:
            kernels.experts(self.x, self.batch(pairs), out, exact)
        return out

    def pairs(self):
        return np.arange(self.choice.size)

    def addresses(self):
        rows = [[part[e].matrix.address for e in self.choice.reshape(-1)] for part in self.parts]
        return torch.tensor(rows, dtype=torch.int64, device="cuda")

    def expected(self):
        out = torch.empty(*self.choice.shape, self.d_model, dtype=torch.float64)
        for token, rank in np.ndindex(*self.choice.shape):
            weights = (part[self.choice[token, rank]].dense for part in self.parts)
            x = self.x[token : token + 1].cpu().double()
            out[token, rank] = reference.swiglu(x, *weights)[0]
        return out


class TestExperts:
    @pytest.mark.parametrize(
        "types",
        [
            ("IQ2_XXS", "IQ2_XXS", "Q2_K"),
            ("Q4_K", "Q8_0", "IQ4_NL"),
            ("MXFP4", "F16", "Q6_K"),
            ("F32", "IQ1_M", "F32"),
            ("IQ3_S", "IQ2_S", "Q5_K"),
        ],
    )
    @pytest.mark.parametrize("tokens", [1, TOKENS, 40])
    def test_experts_are_within_tolerance(self, kernels, upload, types, tokens):
        layer = Layer(upload, *types, tokens=tokens)
        expected = layer.expected()
        result = layer.run(kernels, False, layer.pairs())
        assert relative_error(result, expected) < INT8_SWIGLU_TOLERANCE
        result = layer.run(kernels, True, layer.pairs())
        assert relative_error(result, expected) < EXACT_TOLERANCE

    @pytest.mark.parametrize("name", CODED_FORMATS)
    @pytest.mark.parametrize("tokens", [20, 180])
    def test_experts_of_many_tokens_are_within_tolerance(self, kernels, upload, name, tokens):
        """180 tokens: more than one tile an expert."""
        layer = Layer(upload, name, name, name, tokens)
        assert tokens * TOP_K >= cuda_experts.GROUPED_PAIRS * EXPERTS
        result = layer.run(kernels, False, layer.pairs())
        assert relative_error(result, layer.expected()) < INT8_SWIGLU_TOLERANCE

    @pytest.mark.parametrize("name", ["Q8_0", "Q5_1", "MXFP4"])
    @pytest.mark.parametrize("widths", [(544, 96), (32, 32), (288, 352)])
    def test_odd_widths_and_many_tokens(self, kernels, upload, name, widths):
        layer = Layer(upload, name, name, name, 30, widths)
        result = layer.run(kernels, False, layer.pairs())
        assert relative_error(result, layer.expected()) < INT8_SWIGLU_TOLERANCE

    def test_many_tokens_are_those_tile_by_tile(self, kernels, upload, monkeypatch):
        """But for the order of sums."""
        layer = Layer(upload, "IQ2_XXS", "IQ2_XXS", "Q2_K", 60)
        grouped = layer.run(kernels, False, layer.pairs())
        monkeypatch.setattr(cuda_experts, "GROUPED_PAIRS", 10**9)
        tiled = layer.run(kernels, False, layer.pairs())
        assert relative_error(grouped, tiled.cpu().double()) < 1e-3
        assert not torch.equal(grouped, tiled)  # it was another kernel

    def test_bits_of_many_tokens_do_not_depend_on_waves(self, kernels, upload):
        layer = Layer(upload, "IQ2_XXS", "IQ2_XXS", "Q2_K", 60)
        together = layer.run(kernels, False, layer.pairs())
        experts = layer.choice.reshape(-1)
        waves = (np.flatnonzero(experts >= EXPERTS // 2), np.flatnonzero(experts < EXPERTS // 2))
        assert torch.equal(layer.run(kernels, False, *waves), together)

    def test_dequantised_experts_are_within_tolerance(self, kernels, upload, monkeypatch):
        monkeypatch.setattr(cuda_experts, "DENSE_PAIRS", 4)
        layer = Layer(upload, "MXFP4", "Q4_K", "IQ1_M", tokens=20)
        expected = layer.expected()
        assert relative_error(layer.run(kernels, False, layer.pairs()), expected) < DENSE_TOLERANCE
        expert = layer.choice[13, 1]
        block = kernels.swiglu(layer.x, *(part[expert].matrix for part in layer.parts))
        assert relative_error(block[13], expected[13, 1]) < DENSE_TOLERANCE

    @pytest.mark.parametrize("exact", [False, True])
    def test_bits_depend_on_neither_grouping_nor_entry(self, kernels, upload, exact):
        layer = Layer(upload)
        together = layer.run(kernels, exact, layer.pairs())
        shuffled = np.random.default_rng(6).permutation(layer.pairs())
        for batches in (np.split(shuffled, [4, 5, 16]), layer.pairs()[:, None]):
            assert torch.equal(layer.run(kernels, exact, *batches), together)
        by_address = layer.out()
        kernels.experts_at(layer.x, layer.format, layer.addresses(), by_address, exact)
        assert torch.equal(by_address, together)

    def test_only_the_rows_of_the_batch_are_written(self, kernels, upload):
        out = Layer(upload).run(kernels, False, np.array([4, 7]), np.array([], int))
        written = ~out.isnan().any(-1).reshape(-1)
        assert written.nonzero().flatten().tolist() == [4, 7]
        assert out.view(-1, D_MODEL)[~written].isnan().all()

    def test_pairs_without_addresses_are_left_out(self, kernels, upload):
        layer = Layer(upload)
        addresses, out = layer.addresses(), layer.out()
        late = addresses.clone()
        addresses[:, ::2] = 0
        late[:, 1::2] = 0
        kernels.experts_at(layer.x, layer.format, addresses, out)
        assert out.view(-1, D_MODEL)[::2].isnan().all()
        kernels.experts_at(layer.x, layer.format, late, out)
        assert torch.equal(out, layer.run(kernels, False, layer.pairs()))

    @pytest.mark.parametrize("exact", [False, True])
    def test_swiglu_is_one_expert_for_all_tokens(self, kernels, upload, exact):
        layer = Layer(upload, tokens=20)
        together = layer.run(kernels, exact, layer.pairs())
        expert = layer.choice[13, 1]
        block = kernels.swiglu(layer.x, *(part[expert].matrix for part in layer.parts), exact=exact)
        assert torch.equal(block[13], together[13, 1])

    def test_wide_resident_block(self, kernels, upload):
        parts = [upload("Q8_0", *shape) for shape in ((2816, 512), (2816, 512), (512, 2816))]
        x = inputs(130, 512)
        expected = reference.swiglu(x.cpu().double(), *(part.dense for part in parts))
        for count in (3, 130):
            result = kernels.swiglu(x[:count], *(part.matrix for part in parts))
            assert relative_error(result, expected[:count]) < INT8_SWIGLU_TOLERANCE


def test_inputs_quantised_before_give_the_same_bits(kernels, upload):
    layer = Layer(upload)
    group = kernels.group([upload("Q8_0", 96, D_MODEL).matrix])
    router = kernels.group([upload("F32", 32, D_MODEL).matrix])
    block = [part[0].matrix for part in layer.parts]
    out, again = layer.out(), layer.out()
    expected = (*kernels.linear(layer.x, group), kernels.swiglu(layer.x, *block))
    kernels.linear(inputs(TOKENS, D_MODEL, seed=8), group)
    kernels.experts_at(layer.x, layer.format, layer.addresses(), out)
    kernels.linear(inputs(TOKENS, D_MODEL, seed=8), router, exact=True)
    results = (
        *kernels.linear(layer.x, group, quantised=True),
        kernels.swiglu(layer.x, *block, quantised=True),
    )
    kernels.experts_at(layer.x, layer.format, layer.addresses(), again, quantised=True)
    for result, same in zip((*results, again), (*expected, out), strict=True):
        assert torch.equal(result, same)


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
