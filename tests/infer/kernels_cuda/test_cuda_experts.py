"""Experts on the GPU against float64 on gguf's dequantised weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_bench import (
    D_MODEL,
    DENSE_TOLERANCE,
    EXACT_TOLERANCE,
    EXPERTS,
    INT8_SWIGLU_TOLERANCE,
    TOKENS,
    TOP_K,
    Layer,
    inputs,
    relative_error,
)

from infer.kernels import reference
from infer.kernels.cuda import experts as cuda_experts
from infer.kernels.cuda.formats import CODED_FORMATS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


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

    @pytest.mark.parametrize("name", ["IQ2_XXS", "Q2_K", "Q8_0", "MXFP4", "Q6_K"])
    @pytest.mark.parametrize("shift", [4, 8, 12])
    def test_many_tokens_of_experts_that_begin_anywhere(self, kernels, upload, name, shift):
        """At any multiple of 4 bytes, and up to the end of the memory."""

        def shifted(*arguments):
            weights = upload(*arguments)
            source = weights.matrix.keepalive.flatten()
            moved = torch.empty(len(source) + shift, dtype=torch.uint8, device="cuda")
            moved[shift:] = source
            address = moved.data_ptr() + shift
            return weights._replace(
                matrix=replace(weights.matrix, address=address, keepalive=moved)
            )

        layer, there = Layer(upload, name, name, name, 30), Layer(shifted, name, name, name, 30)
        result = there.run(kernels, False, there.pairs())
        assert torch.equal(result, layer.run(kernels, False, layer.pairs()))

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
