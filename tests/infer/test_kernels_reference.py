"""The torch reference against formulas written out in numpy, and the kernels built on it."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from infer.kernels import reference
from infer.kernels.interface import ExpertBatch, ExpertFormat
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.reference_kernels import ReferenceKernels
from shared.errors import MalformedModel
from shared.quants import TensorType

RNG = np.random.default_rng(5)


def quantised(kind, rows, columns):
    dense = RNG.standard_normal((rows, columns)).astype(np.float32)
    data = gguf.quants.quantize(dense, GGMLQuantizationType(kind))
    return QuantMatrix.over(kind, columns, np.ascontiguousarray(data))


def double(*shape):
    return torch.from_numpy(RNG.standard_normal(shape))


def test_matrix_reads_its_memory_in_place():
    data = np.arange(2 * 34, dtype=np.uint8)
    matrix = QuantMatrix.over(TensorType.Q8_0, 32, data)
    assert (matrix.rows, matrix.columns, matrix.row_bytes) == (2, 32, 34)
    data[40] = 99
    assert matrix.blocks()[1, 6] == 99


def test_matrix_outlives_the_array_it_was_made_over():
    matrix = QuantMatrix.over(TensorType.F32, 4, np.full((100, 4), 7, np.float32))
    view = matrix.blocks().view(np.float32)
    del matrix
    assert (view == 7).all()


def test_matrix_of_partial_blocks_is_refused():
    with pytest.raises(MalformedModel, match="multiple"):
        QuantMatrix.over(TensorType.Q8_0, 33, np.zeros(34, np.uint8))


@pytest.mark.parametrize("kind", [TensorType.F32, TensorType.F16, TensorType.BF16, TensorType.Q8_0])
def test_dequantize_returns_rows_of_floats(kind):
    matrix = quantised(kind, 3, 64)
    expected = gguf.quants.dequantize(matrix.blocks(), GGMLQuantizationType(kind))
    dense = reference.dequantize(matrix)
    assert dense.dtype is torch.float32
    assert np.array_equal(dense.numpy(), expected.reshape(3, 64))


def test_rms_norm_formula():
    x, weight = double(3, 8), double(8)
    expected = x.numpy() / np.sqrt((x.numpy() ** 2).mean(1, keepdims=True) + 1e-5) * weight.numpy()
    np.testing.assert_allclose(reference.rms_norm(x, weight, 1e-5).numpy(), expected, rtol=1e-12)


def test_rope_is_a_complex_rotation_of_the_halves():
    x = double(2, 3, 10)
    angles = torch.outer(torch.arange(9.0, dtype=torch.float64), double(4))
    rotated = reference.rope_neox(x, angles.cos(), angles.sin(), 5).numpy()
    pairs = x.numpy()[..., :4] + 1j * x.numpy()[..., 4:8]
    turned = pairs * np.exp(1j * angles.numpy()[5:7, None, :])
    np.testing.assert_allclose(rotated[..., :4], turned.real, atol=1e-12)
    np.testing.assert_allclose(rotated[..., 4:8], turned.imag, atol=1e-12)
    assert np.array_equal(rotated[..., 8:], x.numpy()[..., 8:])


def test_router_prefers_the_lower_index_on_ties_and_weighs_without_bias():
    logits = torch.tensor([[0.0, 1.0, 1.0, -1.0, 1.0]], dtype=torch.float64)
    bias = torch.tensor([2.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    ids, weights = reference.route_sigmoid(logits, bias, 3, 2.5)
    assert ids.tolist() == [[0, 1, 2]]
    p = 1 / (1 + np.exp(-np.array([0.0, 1.0, 1.0])))
    np.testing.assert_allclose(weights[0].numpy(), p / p.sum() * 2.5, rtol=1e-12)


def test_attention_matches_a_loop_over_heads_and_positions():
    q, keys, values = double(3, 4, 6), double(9, 2, 6), double(9, 2, 6)
    result = reference.attention(q, keys, values, 4, 0.3).numpy()
    for row in range(3):
        for head in range(4):
            visible = slice(0, 4 + row + 1)
            k, v = (cache[visible, head // 2].numpy() for cache in (keys, values))
            weights = np.exp(k @ q[row, head].numpy() * 0.3)
            expected = weights @ v / weights.sum()
            np.testing.assert_allclose(result[row, head], expected, rtol=1e-10)


def test_weighted_sum_adds_in_order_then_the_shared_rows():
    rows = torch.tensor([[[1e8], [1.0], [-1e8]]])
    weights = torch.ones(1, 3)
    assert reference.weighted_sum(rows, weights, torch.tensor([[0.25]])).item() == 0.25
    assert reference.weighted_sum(rows.double(), weights.double(), None).item() == 1.0


def test_swiglu_formula():
    x, gate, up, down = double(2, 5), double(3, 5), double(3, 5), double(4, 3)
    g, u = x.numpy() @ gate.numpy().T, x.numpy() @ up.numpy().T
    expected = (g / (1 + np.exp(-g)) * u) @ down.numpy().T
    np.testing.assert_allclose(reference.swiglu(x, gate, up, down).numpy(), expected, rtol=1e-10)


def test_reference_kernels_place_every_pair_of_every_batch():
    kernels = ReferenceKernels()
    experts = [[quantised(TensorType.Q8_0, *shape) for shape in ((32, 64), (32, 64), (64, 32))]]
    experts += [[quantised(TensorType.Q8_0, *shape) for shape in ((32, 64), (32, 64), (64, 32))]]
    x = double(3, 64).float()
    out = torch.full((3, 2, 64), torch.nan)
    chosen = [[0, 1], [1, 0], [0, 1]]
    for expert, pairs in enumerate(([0, 3, 4], [1, 2, 5])):
        batch = ExpertBatch(
            ExpertFormat(TensorType.Q8_0, TensorType.Q8_0, TensorType.Q8_0, 64, 32),
            np.array(pairs, np.int32),
            np.array([0, 3], np.int32),
            *(np.array([matrix.address], np.int64) for matrix in experts[expert]),
        )
        kernels.experts(x, batch, out)
    for token, ranks in enumerate(chosen):
        for rank, expert in enumerate(ranks):
            alone = kernels.swiglu(x[token : token + 1], *experts[expert])
            torch.testing.assert_close(out[token, rank], alone[0], rtol=1e-4, atol=1e-3)


def test_reference_kernels_look_up_rows_and_multiply_groups():
    kernels = ReferenceKernels()
    table, other = quantised(TensorType.Q8_0, 6, 64), quantised(TensorType.F32, 5, 64)
    x = kernels.embed(table, torch.tensor([4, 1]))
    assert torch.equal(x, reference.dequantize(table)[[4, 1]])
    out = [torch.empty(2, 6), torch.empty(2, 5)]
    results = kernels.linear(x, kernels.group([table, other]), out=out)
    assert results is out
    torch.testing.assert_close(out[1], x @ reference.dequantize(other).T)
