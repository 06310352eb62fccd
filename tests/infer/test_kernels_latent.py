"""Latent attention, selection and heads' products: compiled ones against the reference in float64,
and the reference against formulas written out."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from infer.kernels import reference
from infer.kernels.compiled_latent import SPLIT_ENTRIES
from infer.kernels.compiled_select import SCORE_POSITIONS
from infer.kernels.ggml_cpu import GgmlKernels
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.reference_kernels import ReferenceKernels
from infer.kernels.scratch import KernelBounds, LatentBounds
from shared.quants import TensorType

HEADS, WIDTH, VALUES, CONTEXT = 6, 72, 56, 3 * SCORE_POSITIONS
INDEX_HEADS, INDEX_DIM = 9, 24
BOUNDS = KernelBounds(
    tokens=300,
    columns=256,
    expert_columns=256,
    pairs=300,
    experts=8,
    heads=HEADS,
    head_dim=32,
    context=CONTEXT,
    latent=LatentBounds(
        heads=HEADS,
        width=WIDTH,
        head_columns=64,
        index_heads=INDEX_HEADS,
        index_dim=INDEX_DIM,
        top_k=CONTEXT,
    ),
)


def random(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(result, expected, tolerance=2e-6):
    assert ((result.double() - expected).abs().max() / expected.abs().max()).item() < tolerance


@pytest.fixture(scope="module", params=[1, 3])
def kernels(request):
    return GgmlKernels(BOUNDS, threads=request.param)


def test_pairs_are_rotated_as_complex_numbers():
    x = random(3, 2, 10).double()
    angles = torch.outer(torch.arange(9.0, dtype=torch.float64), random(3).double())
    rotated = reference.rope_pairs(x, angles.cos(), angles.sin(), 5, first=2).numpy()
    pairs = x.numpy()[..., 2:8:2] + 1j * x.numpy()[..., 3:8:2]
    turned = pairs * np.exp(1j * angles.numpy()[5:8, None, :])
    np.testing.assert_allclose(rotated[..., 2:8:2], turned.real, atol=1e-12)
    np.testing.assert_allclose(rotated[..., 3:8:2], turned.imag, atol=1e-12)
    assert np.array_equal(rotated[..., [0, 1, 8, 9]], x.numpy()[..., [0, 1, 8, 9]])


def test_latent_attention_is_that_of_expanded_keys_and_values():
    """Scores by W_k latent and outputs by W_v latent, without absorbing either."""
    q, latent = random(5, HEADS, 8).double(), random(20, 12, seed=2).double()
    key, value = random(HEADS, 8, 12, seed=3).double(), random(HEADS, 7, 12, seed=4).double()
    absorbed = torch.einsum("nhd,hdc->nhc", q, key)
    mixed = reference.latent_attention(absorbed, latent, 12, 15, 0.3)
    result = reference.per_head(mixed, value)
    for head in range(HEADS):
        keys, values = latent @ key[head].T, latent @ value[head].T
        for row in range(5):
            weights = torch.softmax(0.3 * keys[: 16 + row] @ q[row, head], 0)
            torch.testing.assert_close(result[row, head], weights @ values[: 16 + row])


def test_selection_formula():
    q, weights, keys = (random(*s).double() for s in ((4, 3, 5), (4, 3), (30, 5)))
    selected = reference.select(q, weights, keys, 10, 12)
    for row in range(4):
        visible = 11 + row
        scores = [
            sum(float(weights[row, h]) * max(0.0, float(q[row, h] @ keys[j])) for h in range(3))
            for j in range(visible)
        ]
        best = sorted(range(visible), key=lambda j, s=scores: (-s[j], j))[:12]
        assert selected[row].tolist() == (sorted(best) if visible > 12 else list(range(12)))


@pytest.mark.parametrize(("first", "half"), [(0, 12), (11, 6), (24, 0)])
def test_rope_pairs(kernels, first, half):
    angles = random(CONTEXT, half) * 100
    x = random(90, HEADS, 24)
    expected = reference.rope_pairs(
        x.double(), angles.cos().double(), angles.sin().double(), 600, first
    )
    kernels.rope_pairs(x, angles.cos(), angles.sin(), 600, first)
    assert_close(x, expected)


@pytest.mark.parametrize("kind", [TensorType.F32, TensorType.Q8_0, TensorType.BF16])
@pytest.mark.parametrize("tokens", [1, 7])
def test_per_head(kernels, kind, tokens):
    dense = random(HEADS, 19, 64).numpy()
    data = np.ascontiguousarray(gguf.quants.quantize(dense, GGMLQuantizationType(kind)))
    matrices = [QuantMatrix.over(kind, 64, data[head]) for head in range(HEADS)]
    weights = torch.stack([reference.dequantize(matrix) for matrix in matrices]).double()
    x = random(tokens, HEADS, 64, seed=2)
    expected = torch.einsum("nhc,hrc->nhr", x.double(), weights)
    for kernel, exact, tolerance in (
        (kernels, True, 2e-6),
        (kernels, False, 0.02),
        (ReferenceKernels(), True, 2e-6),
    ):
        result = kernel.per_head(x, kernel.heads(matrices), exact)
        assert result.is_contiguous()
        assert_close(result, expected, tolerance)


def _selection(rows, start, top_k, seed):
    """Random distinct positions, ascending, as `select` gives them."""
    generator = torch.Generator().manual_seed(seed)
    lists = [
        torch.randperm(start + row + 1, generator=generator)[:top_k].sort().values
        if start + row + 1 > top_k
        else torch.arange(top_k)
        for row in range(rows)
    ]
    return torch.stack(lists).to(torch.int32)


@pytest.mark.parametrize("cache_type", [torch.float32, torch.float16])
@pytest.mark.parametrize("top_k", [None, 5, SPLIT_ENTRIES + 1, CONTEXT])
@pytest.mark.parametrize(
    ("start", "rows"),
    [(0, 1), (0, 300), (SPLIT_ENTRIES - 1, 3), (SPLIT_ENTRIES, 1), (CONTEXT - 70, 70)],
)
def test_latent_attention(kernels, start, rows, top_k, cache_type):
    q = random(rows, HEADS, WIDTH)
    latent = random(CONTEXT, WIDTH, seed=2).to(cache_type)
    # What has not been stored yet must not be looked at.
    latent[start + rows :] = torch.nan
    selected = None if top_k is None else _selection(rows, start, top_k, seed=3)
    result = kernels.latent_attention(q, latent, VALUES, start, 0.2, selected)
    expected = reference.latent_attention(q.double(), latent, VALUES, start, 0.2, selected)
    assert_close(result, expected, 5e-6)
    for row in {0, rows // 2, rows - 1}:
        mine = None if selected is None else selected[row : row + 1]
        alone = kernels.latent_attention(q[row : row + 1], latent, VALUES, start + row, 0.2, mine)
        assert torch.equal(alone[0], result[row])


def test_selecting_all_is_selecting_nothing(kernels):
    q, latent = random(9, HEADS, WIDTH), random(CONTEXT, WIDTH, seed=2)
    every = torch.arange(300, dtype=torch.int32).repeat(9, 1)
    results = [kernels.latent_attention(q, latent, VALUES, 280, 0.2, s) for s in (None, every)]
    assert torch.equal(*results)


@pytest.mark.parametrize("cache_type", [torch.float32, torch.float16])
@pytest.mark.parametrize("top_k", [1, 40, 256])
@pytest.mark.parametrize(
    ("start", "rows"), [(0, 1), (0, 300), (SCORE_POSITIONS - 1, 3), (CONTEXT - 9, 9)]
)
def test_select(kernels, start, rows, top_k, cache_type):
    q, weights = random(rows, INDEX_HEADS, INDEX_DIM), random(rows, INDEX_HEADS, seed=2)
    keys = random(CONTEXT, INDEX_DIM, seed=3).to(cache_type)
    keys[start + rows :] = torch.nan
    selected = kernels.select(q, weights, keys, start, top_k).long()
    assert selected.shape == (rows, top_k)
    end = start + rows
    scores = reference.index_scores(q.double(), weights.double(), keys[:end])
    for row in range(rows):
        visible = start + row + 1
        chosen = selected[row]
        if visible <= top_k:
            assert torch.equal(chosen, torch.arange(top_k))
            continue
        assert (chosen.diff() > 0).all()
        assert chosen[-1] < visible
        best = scores[row, :visible].sort(descending=True).values[:top_k]
        # Scores that float32 cannot tell apart may be chosen for each other.
        assert_close(scores[row, chosen].sort(descending=True).values, best, 1e-5)


def test_ties_go_to_the_lower_position(kernels):
    q, weights = torch.ones(1, 1, INDEX_DIM), torch.ones(1, 1)
    keys = torch.zeros(CONTEXT, INDEX_DIM)
    keys[[500, 90, 300]] = 1.0
    keys[400] = -1.0  # no less than the zeros, by relu
    selected = kernels.select(q, weights, keys, 600, 7)
    assert selected.tolist() == [[0, 1, 2, 3, 90, 300, 500]]
    below = kernels.select(q, -weights, keys, 600, 3)
    assert below.tolist() == [[0, 1, 2]]


def test_missing_scores_select_positions_all_the_same(kernels):
    q, weights = torch.full((2, 3, INDEX_DIM), torch.nan), torch.ones(2, 3)
    selected = kernels.select(q, weights, torch.ones(CONTEXT, INDEX_DIM), 200, 50)
    for row in selected.tolist():
        assert len(set(row)) == 50
        assert min(row) >= 0
        assert max(row) <= 201
