"""Norms, rotation, routing and attention on the GPU against the reference in float64."""

import pytest
import torch

from infer.kernels import reference
from infer.kernels.cuda.attention import FLASH_TOKENS
from infer.kernels.cuda.kernels import CudaKernels
from infer.kernels.scratch import KernelBounds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

BOUNDS = KernelBounds(
    tokens=64,
    columns=512,
    expert_columns=32,
    pairs=64,
    experts=8,
    heads=64,
    head_dim=256,
    context=4096,
)


@pytest.fixture(scope="module")
def kernels():
    return CudaKernels(BOUNDS)


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(result, expected):
    return ((result.cpu().double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("shape", [(3, 4096), (5, 64, 128), (2, 40)])
def test_rms_norm(kernels, shape):
    x, weight = normal(*shape), normal(shape[-1], seed=2)
    expected = reference.rms_norm(x.double(), weight.double(), 1e-6)
    there = x.cuda()
    assert relative_error(kernels.rms_norm(there, weight.cuda(), 1e-6), expected) < 1e-6
    assert kernels.rms_norm(there, weight.cuda(), 1e-6, out=there) is there
    assert relative_error(there, expected) < 1e-6


@pytest.mark.parametrize("rotated", [64, 128])
def test_rope(kernels, rotated):
    x = normal(3, 8, 128)
    angles = normal(20, rotated // 2, seed=2)
    cos, sin = angles.cos(), angles.sin()
    expected = reference.rope_neox(x.double(), cos.double(), sin.double(), 7)
    for start in (7, torch.tensor([7], dtype=torch.int32, device="cuda")):
        there = x.cuda()
        kernels.rope(there, cos.cuda(), sin.cuda(), start)
        assert relative_error(there, expected) < 1e-6
        assert torch.equal(there.cpu()[..., rotated:], x[..., rotated:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rotated", [64, 128])
def test_prepared_heads_have_the_bits_of_the_single_steps(kernels, dtype, rotated):
    start = 7
    q, k, v = normal(3, 16, 128).cuda(), normal(3, 4, 128, seed=2).cuda(), normal(3, 4, 128).cuda()
    norms = normal(2, 128, seed=3).cuda()
    tables = normal(2, 20, rotated // 2, seed=4).cuda()
    keys, values = torch.zeros(2, 20, 4, 128, dtype=dtype, device="cuda")
    expected = q.clone(), k.clone()
    for x, weight in zip(expected, norms, strict=True):
        kernels.rms_norm(x, weight, 1e-5, out=x)
        kernels.rope(x, *tables, start)
    position = torch.tensor([start], dtype=torch.int32, device="cuda")
    kernels.prepare_heads((q, k, v), tuple(norms), 1e-5, tuple(tables), (keys, values), position)
    assert torch.equal(q, expected[0])
    assert torch.equal(keys[start : start + 3], expected[1].to(dtype))
    assert torch.equal(values[start : start + 3], v.to(dtype))
    assert not keys[:start].any()
    assert not values[start + 3 :].any()


@pytest.mark.parametrize("experts", [8, 192, 257, 1024])
@pytest.mark.parametrize("biased", [False, True])
def test_router(kernels, experts, biased):
    logits, bias = normal(33, experts), normal(experts, seed=2) if biased else None
    top_k = min(8, experts)
    expected_ids, expected = reference.route_sigmoid(
        logits.double(), None if bias is None else bias.double(), top_k, 2.5
    )
    ids, weights = kernels.route_sigmoid(
        logits.cuda(), None if bias is None else bias.cuda(), top_k, 2.5
    )
    assert ids.dtype is torch.int32
    assert torch.equal(ids.cpu(), expected_ids)
    assert relative_error(weights, expected) < 1e-6


def test_router_prefers_the_lower_index_on_ties(kernels):
    logits = torch.zeros(1, 100)
    logits[0, [70, 33, 5, 34]] = 1
    ids, weights = kernels.route_sigmoid(logits.cuda(), None, 6, 1.0)
    assert ids.tolist() == [[5, 33, 34, 70, 0, 1]]
    assert weights.sum().item() == pytest.approx(1)


def test_router_chooses_distinct_experts_whatever_comes(kernels):
    logits = torch.full((1, 40), torch.nan)
    ids, _ = kernels.route_sigmoid(logits.cuda(), None, 8, 1.0)
    assert ids.tolist() == [list(range(8))]


@pytest.mark.parametrize("shared", [False, True])
def test_weighted_sum_has_the_references_bits(kernels, shared):
    rows, weights, block = normal(5, 8, 300), normal(5, 8, seed=2), normal(5, 300, seed=3)
    block = block if shared else None
    result = kernels.weighted_sum(
        rows.cuda(), weights.cuda(), None if block is None else block.cuda()
    )
    assert torch.equal(result.cpu(), reference.weighted_sum(rows, weights, block))


# Beside 16-bit caches queries and probabilities are rounded to the cache's type.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class TestAttention:
    def check(self, kernels, n, start, heads, kv_heads, head_dim, dtype, tolerance):
        q = normal(n, heads, head_dim)
        keys = normal(start + n + 50, kv_heads, head_dim, seed=2).to(dtype)
        values = normal(start + n + 50, kv_heads, head_dim, seed=3).to(dtype)
        # What lies behind the last position must not matter.
        keys[start + n :] = torch.nan
        values[start + n :] = torch.nan
        expected = reference.attention(
            q.double(), keys.double(), values.double(), start, head_dim**-0.5
        )
        arguments = (q.cuda(), keys.cuda(), values.cuda())
        result = kernels.attention(*arguments, start, head_dim**-0.5)
        assert relative_error(result, expected) < tolerance
        return arguments, result

    @pytest.mark.parametrize("dtype", TOLERANCES)
    @pytest.mark.parametrize("start", [0, 5, 63, 64, 1000, 3500])
    def test_decode(self, kernels, dtype, start):
        arguments, result = self.check(kernels, 1, start, 64, 8, 128, dtype, TOLERANCES[dtype])
        position = torch.tensor([start], dtype=torch.int32, device="cuda")
        assert torch.equal(kernels.attention(*arguments, position, 128**-0.5), result)

    @pytest.mark.parametrize(
        "shape", [(4, 4, 64), (6, 2, 96), (10, 2, 128), (32, 2, 256), (24, 2, 32), (2, 1, 128)]
    )
    @pytest.mark.parametrize("dtype", TOLERANCES)
    def test_shapes(self, kernels, shape, dtype):
        self.check(kernels, 3, 200, *shape, dtype, TOLERANCES[dtype])

    @pytest.mark.parametrize("dtype", TOLERANCES)
    @pytest.mark.parametrize("start", [0, 300])
    def test_prefill(self, kernels, dtype, start):
        tolerance = TOLERANCES[dtype]
        self.check(kernels, FLASH_TOKENS + 20, start, 16, 4, 128, dtype, tolerance)

    def test_bits_do_not_depend_on_the_batch(self, kernels):
        (q, keys, values), result = self.check(
            kernels, 8, 700, 16, 4, 128, torch.bfloat16, TOLERANCES[torch.bfloat16]
        )
        for i in range(8):
            alone = kernels.attention(q[i : i + 1], keys, values, 700 + i, 128**-0.5)
            assert torch.equal(alone[0], result[i])
