"""Norms, rotations, routing, sums and attention, against the reference in float64."""

import pytest
import torch

from infer.kernels import reference
from infer.kernels.compiled_attention import SPLIT_POSITIONS
from infer.kernels.ggml_cpu import GgmlKernels
from infer.kernels.scratch import KernelBounds

HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 12, 3, 40, 3 * SPLIT_POSITIONS
BOUNDS = KernelBounds(
    tokens=300,
    columns=1024,
    expert_columns=256,
    pairs=1200,
    experts=192,
    heads=HEADS,
    head_dim=HEAD_DIM,
    context=CONTEXT,
)


def random(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(result, expected, tolerance=2e-6):
    assert ((result.double() - expected).abs().max() / expected.abs().max()).item() < tolerance


@pytest.fixture(scope="module", params=[1, 3])
def kernels(request):
    return GgmlKernels(BOUNDS, threads=request.param)


@pytest.mark.parametrize("rows", [1, 300])
def test_rms_norm(kernels, rows):
    x, weight = random(rows, 512), random(512)
    expected = reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert_close(kernels.rms_norm(x, weight, 1e-5), expected)
    kernels.rms_norm(x, weight, 1e-5, out=x)
    assert_close(x, expected)


def test_rms_norm_of_heads_and_of_tiny_values(kernels):
    x, weight = random(5, HEADS, HEAD_DIM) * 1e-4, random(HEAD_DIM)
    expected = reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert_close(kernels.rms_norm(x, weight, 1e-5), expected)


@pytest.mark.parametrize("half", [HEAD_DIM // 2, 7])
def test_rope_turns_by_position(kernels, half):
    angles = random(CONTEXT, half) * 100
    cos, sin = angles.cos(), angles.sin()
    x = random(90, HEADS, HEAD_DIM)
    expected = reference.rope_neox(x.double(), cos.double(), sin.double(), 600)
    parts = x.clone()
    kernels.rope(x, cos, sin, 600)
    assert_close(x, expected)
    for row in range(90):
        kernels.rope(parts[row : row + 1], cos, sin, 600 + row)
    assert torch.equal(parts, x)


@pytest.mark.parametrize("biased", [False, True])
def test_route_sigmoid(kernels, biased):
    logits = random(200, 192) * 3
    bias = random(192, seed=2) if biased else None
    ids, weights = kernels.route_sigmoid(logits, bias, 8, 2.826)
    p = logits.double().sigmoid()
    scores = p if bias is None else p + bias.double()
    # Scores that float32 cannot tell apart may come in either order.
    assert_close(scores.gather(1, ids.long()), scores.sort(1, descending=True).values[:, :8], 1e-6)
    assert all(len(set(row)) == 8 for row in ids.tolist())
    chosen = p.gather(1, ids.long())
    assert_close(weights, chosen / chosen.sum(1, keepdim=True) * 2.826)


def test_route_ties_go_to_the_lower_index(kernels):
    logits = torch.zeros(1, 192)
    logits[0, [100, 50, 120]] = 1.0
    ids, _ = kernels.route_sigmoid(logits, None, 6, 1.0)
    assert ids.tolist() == [[50, 100, 120, 0, 1, 2]]


def test_route_of_extreme_and_missing_logits_stays_within_the_experts(kernels):
    logits = torch.full((3, 8), -1e30)
    logits[1] = torch.nan
    logits[2, 5] = 1e30
    ids, weights = kernels.route_sigmoid(logits, None, 8, 1.0)
    assert all(sorted(row) == list(range(8)) for row in ids.tolist())
    assert ids[2, 0] == 5
    assert weights[2, 0] == 1.0
    assert weights[1].isnan().all()


@pytest.mark.parametrize("rows", [1, 60])
def test_weighted_sum_has_the_references_bits(kernels, rows):
    values, weights, shared = random(rows, 8, 1024), random(rows, 8), random(rows, 1024, seed=3)
    for extra in (None, shared):
        expected = reference.weighted_sum(values, weights, extra)
        assert torch.equal(kernels.weighted_sum(values, weights, extra), expected)


@pytest.mark.parametrize("cache_type", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("start", "rows"),
    [(0, 1), (0, 300), (SPLIT_POSITIONS - 1, 3), (SPLIT_POSITIONS, 1), (CONTEXT - 70, 70)],
)
def test_attention(kernels, start, rows, cache_type):
    q = random(rows, HEADS, HEAD_DIM)
    keys = random(CONTEXT, KV_HEADS, HEAD_DIM, seed=2).to(cache_type)
    values = random(CONTEXT, KV_HEADS, HEAD_DIM, seed=3).to(cache_type)
    # What has not been stored yet must not be looked at.
    keys[start + rows :] = values[start + rows :] = torch.nan
    result = kernels.attention(q, keys, values, start, HEAD_DIM**-0.5)
    expected = reference.attention(q.double(), keys, values, start, HEAD_DIM**-0.5)
    assert_close(result, expected, 5e-6)
    for row in {0, rows // 2, rows - 1}:
        alone = kernels.attention(q[row : row + 1], keys, values, start + row, HEAD_DIM**-0.5)
        assert torch.equal(alone[0], result[row])


def test_attention_of_large_scores_does_not_overflow(kernels):
    q = random(4, HEADS, HEAD_DIM) * 100
    keys, values = random(CONTEXT, KV_HEADS, HEAD_DIM), random(CONTEXT, KV_HEADS, HEAD_DIM, seed=3)
    result = kernels.attention(q, keys, values, CONTEXT - 4, 1.0)
    # float32 rounds scores of some thousands by up to 2e-4, and their exponentials as much
    expected = reference.attention(q.double(), keys, values, CONTEXT - 4, 1.0)
    assert_close(result, expected, 2e-3)


def test_bits_do_not_depend_on_threads():
    alone, many = GgmlKernels(BOUNDS, threads=1), GgmlKernels(BOUNDS, threads=6)
    q = random(40, HEADS, HEAD_DIM)
    keys, values = random(CONTEXT, KV_HEADS, HEAD_DIM), random(CONTEXT, KV_HEADS, HEAD_DIM, seed=3)
    results = [k.attention(q, keys, values, CONTEXT - 40, 0.2) for k in (alone, many)]
    assert torch.equal(*results)
    results = [k.rms_norm(random(300, 512), random(512), 1e-5) for k in (alone, many)]
    assert torch.equal(*results)
    results = [k.route_sigmoid(random(300, 192), None, 8, 1.0) for k in (alone, many)]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
