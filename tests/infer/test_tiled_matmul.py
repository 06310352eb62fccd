"""Products by tiles: which tokens they are for, and bits that follow from nothing else.

Their error is tested type by type in test_kernel_types.py. They are enabled here on any processor.
"""

import numpy as np
import pytest
import torch
from gguf_blocks import random_blocks

from infer.kernels import ggml_library, reference
from infer.kernels.interface import ExpertBatch, ExpertFormat
from infer.kernels.pieces import part_by_count
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.tiled_matmul import TiledMatmul, least_tokens
from shared.quants import TensorType

Q8_0, Q6_K, IQ2_XXS = TensorType.Q8_0, TensorType.Q6_K, TensorType.IQ2_XXS
# More rows than a tile of so many columns has: 64 of 8192
ROWS, COLUMNS, TOKENS = 150, 8192, 40
D_MODEL, D_FF, EXPERTS, TOP_K = 512, 256, 3, 2
TOLERANCE = 0.004


def matrix(kind, rows, columns, seed=0):
    return QuantMatrix.over(
        kind, columns, random_blocks(np.random.default_rng(seed), kind, rows, columns)
    )


def inputs(rows, columns):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


def error(result, expected):
    return ((result.double() - expected).norm() / expected.norm()).item()


@pytest.fixture(scope="module", params=[1, 3])
def tiled(request):
    return TiledMatmul(ggml_library.load(), request.param, enabled=True)


@pytest.fixture(scope="module")
def alone():
    return TiledMatmul(ggml_library.load(), 1, enabled=True)


def test_several_matrices_of_several_tiles(tiled, alone):
    matrices = [matrix(Q8_0, ROWS, COLUMNS), matrix(Q6_K, 7, COLUMNS)]
    x = inputs(TOKENS, COLUMNS)
    out, again = ([torch.full((TOKENS, m.rows), torch.nan) for m in matrices] for _ in range(2))
    tiled.linear(x, matrices, out)
    alone.linear(x, matrices, again)
    for m, result, same in zip(matrices, out, again, strict=True):
        assert error(result, x.double() @ reference.dequantize(m).double().T) < TOLERANCE
        assert torch.equal(result, same)


def test_more_tokens_than_a_piece_has(alone, monkeypatch):
    monkeypatch.setattr("infer.kernels.tiled_matmul._PIECE_VALUES", 33 * D_MODEL)
    m, x = matrix(Q8_0, D_FF, D_MODEL), inputs(100, D_MODEL)
    out = torch.full((100, D_FF), torch.nan)
    alone.linear(x, [m], [out])
    assert error(out, x.double() @ reference.dequantize(m).double().T) < TOLERANCE


class Routed:
    """Tokens of which expert g has the first counts[g], as the choice number `ranks[g]` of each."""

    def __init__(self, counts=(40, 0, 9), ranks=(0, 0, 1)):
        pairs = [
            np.arange(c, dtype=np.int32) * TOP_K + r for c, r in zip(counts, ranks, strict=True)
        ]
        self.blocks = [
            (
                matrix(IQ2_XXS, D_FF, D_MODEL, seed),
                matrix(Q6_K, D_FF, D_MODEL, seed + 9),
                matrix(Q8_0, D_MODEL, D_FF, seed),
            )
            for seed in range(EXPERTS)
        ]
        addresses = np.array([[m.address for m in block] for block in self.blocks], np.int64)
        self.batch = ExpertBatch(
            ExpertFormat(IQ2_XXS, Q6_K, Q8_0, D_MODEL, D_FF),
            np.concatenate(pairs),
            np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            *np.ascontiguousarray(addresses.T),
        )
        self.x = inputs(TOKENS, D_MODEL)

    def out(self):
        return torch.full((TOKENS, TOP_K, D_MODEL), torch.nan)


def test_experts_write_their_rows_and_no_others(tiled):
    routed = Routed()
    out = routed.out()
    tiled.experts(routed.x, routed.batch, out)
    for expert, count, rank in ((0, 40, 0), (2, 9, 1)):
        weights = [reference.dequantize(m).double() for m in routed.blocks[expert]]
        expected = reference.swiglu(routed.x[:count].double(), *weights)
        assert error(out[:count, rank], expected) < 2 * TOLERANCE
    assert out[9:, 1].isnan().all()


def test_an_experts_bits_do_not_depend_on_the_others(tiled, alone):
    """Those that come late are computed later."""
    routed = Routed()
    together, apart = routed.out(), routed.out()
    tiled.experts(routed.x, routed.batch, together)
    for part in part_by_count(routed.batch, 20):
        alone.experts(routed.x, part, apart)
    assert torch.equal(together.nan_to_num(), apart.nan_to_num())


def test_a_gated_block_is_an_expert_of_all(tiled):
    routed = Routed(counts=(TOKENS, 0, 0))
    out, expert = torch.empty(TOKENS, D_MODEL), routed.out()
    tiled.swiglu(routed.x, *routed.blocks[0], out)
    tiled.experts(routed.x, routed.batch, expert)
    assert torch.equal(out, expert[:, 0])


def test_part_by_count_keeps_order_and_addresses():
    batch = Routed(counts=(3, 1, 2)).batch
    many, few = part_by_count(batch, 2)
    assert many.pairs.tolist() == [0, 2, 4, 1, 3]
    assert many.group_start.tolist() == [0, 3, 5]
    assert many.gate.tolist() == batch.gate[[0, 2]].tolist()
    assert few.pairs.tolist() == [0]
    assert few.down.tolist() == batch.down[[1]].tolist()


@pytest.mark.parametrize(
    ("kinds", "tokens", "pays"),
    [
        ((Q8_0,), 2, False),  # a token and a guess at the next one
        ((Q8_0,), 32, True),
        ((Q6_K,), 32, False),  # slow to dequantise
        ((IQ2_XXS, IQ2_XXS, Q6_K), 32, True),
        ((TensorType.F32,), 200, False),
        ((Q8_0, TensorType.F16), 200, False),
    ],
)
def test_what_pays(alone, kinds, tokens, pays):
    assert alone.pays(kinds, tokens) is pays
    assert not TiledMatmul(ggml_library.load(), 1, enabled=False).pays(kinds, tokens)
    assert least_tokens([Q8_0]) < least_tokens([Q8_0, Q6_K]) < least_tokens([Q6_K])


def test_an_error_in_a_thread_is_raised(tiled):
    with pytest.raises(RuntimeError):
        tiled.linear(inputs(TOKENS, 512), [matrix(Q8_0, 4, 256)], [torch.empty(TOKENS, 4)])
