"""Large calls go through the compiled loops in pieces, and nobody can tell from the result."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.kernels import pieces
from infer.kernels.ggml_cpu import GgmlKernels
from infer.kernels.interface import ExpertBatch, ExpertFormat
from infer.kernels.pieces import piece_rows, piece_values, split_batch


def _batch(counts):
    total = sum(counts)
    addresses = np.arange(len(counts), dtype=np.int64)
    return ExpertBatch(
        ExpertFormat(0, 0, 0, 4, 4),
        np.random.default_rng(0).permutation(total).astype(np.int32),
        np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        *(addresses + 100 * part for part in range(3)),
    )


def _work(batch):
    """Which pair meets which expert's weights, in order."""
    counts = np.diff(batch.group_start)
    parts = zip(*(np.repeat(a, counts) for a in (batch.gate, batch.up, batch.down)), strict=True)
    return list(zip(batch.pairs.tolist(), parts, strict=True))


@given(st.lists(st.integers(0, 7), min_size=1, max_size=12), st.integers(1, 9))
def test_every_pair_is_in_one_piece(counts, most):
    batch = _batch(counts)
    split = list(split_batch(batch, most))
    assert [pair for piece in split for pair in _work(piece)] == _work(batch)
    for piece in split:
        assert len(piece.pairs) <= most
        assert len(piece.gate) == len(piece.up) == len(piece.down) == len(piece.group_start) - 1
        assert piece.group_start[0] == 0
        assert piece.group_start[-1] == len(piece.pairs)
        assert piece.group_start.dtype == piece.pairs.dtype == np.int32


def test_bounds():
    # Hy3: an expert of 4,096 x 1,536 and its dense block of 4,096 x 13,312.
    assert piece_rows(3 * 4096 * 1536, 1536, piece_values(1536, 8 * 8192)) == 158
    assert piece_rows(3 * 4096 * 13312, 13312, piece_values(13312, 8192)) == 18
    assert piece_rows(10**10, 4096, 4096) == 1, "one row always goes"
    assert piece_values(4, 10) == 40
    assert piece_values(pieces.PIECE_VALUES + 1, 10) == pieces.PIECE_VALUES + 1


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["PIECE_PRODUCTS", "PIECE_VALUES"])
def test_bits_do_not_depend_on_the_pieces(
    name, exact, gguf_factory, local_model, tmp_path, monkeypatch
):
    path = gguf_factory.hy3_model().write(tmp_path / "model.gguf")
    ids = np.random.default_rng(1).integers(0, 256, 40).tolist()

    def logits():
        model = local_model(path, lambda bounds: GgmlKernels(bounds, 2), exact=exact)
        return model.logits(ids)

    whole = logits()
    # At most 5 rows of a matrix of 256 x 256, or 3 rows of 256 values.
    monkeypatch.setattr(pieces, name, {"PIECE_PRODUCTS": 5 << 16, "PIECE_VALUES": 800}[name])
    np.testing.assert_array_equal(logits(), whole)
