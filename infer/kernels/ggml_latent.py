"""Latent attention, the choice of what it reads, and the products of single heads."""

import torch
from torch import Tensor

from infer.kernels.compiled_latent import (
    HEADS_AT_ONCE,
    SPLIT_ENTRIES,
    LatentJob,
    attend_entries,
    merge_entries,
)
from infer.kernels.compiled_select import (
    HISTOGRAM_BYTES,
    SCORE_POSITIONS,
    ScoreJob,
    SelectJob,
    score_positions,
    select_positions,
)
from infer.kernels.ggml_heads import GgmlHeads
from infer.kernels.ggml_library import GgmlLibrary
from infer.kernels.jobs import prepared_job
from infer.kernels.matmul_tasks import Matmul
from infer.kernels.scratch import KernelBounds, LatentBounds, Scratch, address_of
from infer.kernels.thread_team import ThreadTeam, run
from shared.quants import TensorType

# Partial results, and scores, of as many rows as fit here are computed before they are used.
_BLOCK_BYTES = 8 << 20


class GgmlLatent:
    """What models with latent attention need beside the rest."""

    def __init__(
        self,
        library: GgmlLibrary,
        team: ThreadTeam,
        matmul: Matmul,
        scratch: Scratch,
        bounds: KernelBounds,
        latent: LatentBounds,
    ) -> None:
        self.heads = GgmlHeads(library, team, matmul, scratch, bounds.tokens, latent)
        self.attention = GgmlLatentAttention(library, team, scratch, bounds.context, latent)
        self.select = GgmlSelect(library, team, scratch, bounds.context, latent.index_dim)


class GgmlLatentAttention:
    """`_BLOCK_BYTES` of partial results: one row of 64 heads over 2,048 positions takes 2.1 MB."""

    def __init__(
        self,
        library: GgmlLibrary,
        team: ThreadTeam,
        scratch: Scratch,
        context: int,
        bounds: LatentBounds,
    ) -> None:
        self._half_to_float = library.functions(TensorType.F16).to_float
        self._bounds = bounds
        self._context = context
        one_row = _partial_bytes(bounds.heads, bounds.width, context)
        self._partial_bytes = max(one_row, _BLOCK_BYTES)
        self._job = prepared_job(LatentJob, team.at)
        self._job.partial = scratch.reserve(self._partial_bytes)
        self._job.tile_bytes = 4 * SPLIT_ENTRIES * (HEADS_AT_ONCE + bounds.width)
        self._job.tiles = scratch.reserve(team.threads * self._job.tile_bytes)

    def __call__(
        self,
        q: Tensor,
        latent: Tensor,
        value_width: int,
        start: int,
        scale: float,
        selected: Tensor | None,
    ) -> Tensor:
        rows, heads, width = q.shape
        end = start + rows
        assert latent.shape[1] == width <= self._bounds.width
        assert value_width <= width
        assert heads <= self._bounds.heads
        assert 0 <= start < end <= len(latent)
        assert end <= self._context
        out = torch.empty((rows, heads, value_width))
        job = self._job
        job.latent, job.to_float = _cache(latent, self._half_to_float)
        job.heads, job.width, job.value_width, job.scale = heads, width, value_width, scale
        job.top_k, selected_at, selected_bytes = end, 0, 0
        if selected is not None:
            selected_at, selected_bytes = _selection(selected, rows), 4 * selected.shape[1]
            job.top_k = selected.shape[1]
        queries, outputs = address_of(q), out.data_ptr()
        entries = min(job.top_k, end)
        block = max(1, self._partial_bytes // _partial_bytes(heads, value_width, entries))
        for first in range(0, rows, block):
            job.rows = min(block, rows - first)
            job.start = start + first
            job.queries = queries + first * heads * width * 4
            job.out = outputs + first * heads * value_width * 4
            job.selected = selected_at + first * selected_bytes
            most = min(job.top_k, job.start + job.rows)
            job.splits = -(-most // SPLIT_ENTRIES)
            job.items = job.rows * job.splits
            run(job.at, attend_entries)
            job.items = job.rows * heads
            run(job.at, merge_entries)
        return out


class GgmlSelect:
    """Scores take four bytes a position and row, of as many rows at a time as fit _BLOCK_BYTES: 16
    at 131,072 positions. Nothing is ever kept for single heads."""

    def __init__(
        self,
        library: GgmlLibrary,
        team: ThreadTeam,
        scratch: Scratch,
        context: int,
        width: int,
    ) -> None:
        self._half_to_float = library.functions(TensorType.F16).to_float
        self._context = context
        self._width = width
        self._score_bytes = max(4 * context, _BLOCK_BYTES)
        self._score = prepared_job(ScoreJob, team.at)
        self._select = prepared_job(SelectJob, team.at)
        self._score.scores = self._select.scores = scratch.reserve(self._score_bytes)
        self._score.tile_bytes = 4 * SCORE_POSITIONS * width
        self._score.tiles = scratch.reserve(team.threads * self._score.tile_bytes)
        self._select.histograms = scratch.reserve(team.threads * HISTOGRAM_BYTES)

    def __call__(self, q: Tensor, weights: Tensor, keys: Tensor, start: int, top_k: int) -> Tensor:
        rows, heads, width = q.shape
        end = start + rows
        assert weights.shape == (rows, heads)
        assert keys.shape[1] == width <= self._width
        assert 0 <= start < end <= len(keys)
        assert end <= self._context
        assert top_k >= 1
        out = torch.empty((rows, top_k), dtype=torch.int32)
        score, select = self._score, self._select
        score.keys, score.to_float = _cache(keys, self._half_to_float)
        score.heads, score.width, select.top_k = heads, width, top_k
        queries, weights_at, out_at = address_of(q), address_of(weights), out.data_ptr()
        block = self._score_bytes // (4 * end)
        for first in range(0, rows, block):
            score.rows = select.rows = select.items = min(block, rows - first)
            score.start = select.start = start + first
            score.queries = queries + first * heads * width * 4
            score.weights = weights_at + first * heads * 4
            select.out = out_at + first * top_k * 4
            score.items = -(-(score.start + score.rows) // SCORE_POSITIONS)
            run(score.at, score_positions)
            run(select.at, select_positions)
        return out


def _cache(cache: Tensor, half_to_float: int) -> tuple[int, int]:
    """Its address, and the function that makes floats of it."""
    assert cache.dtype in (torch.float32, torch.float16)
    assert cache.is_contiguous()
    return cache.data_ptr(), half_to_float if cache.dtype is torch.float16 else 0


def _selection(selected: Tensor, rows: int) -> int:
    assert selected.dtype is torch.int32
    assert selected.is_contiguous()
    assert len(selected) == rows
    return selected.data_ptr()


def _partial_bytes(heads: int, value_width: int, entries: int) -> int:
    splits = -(-entries // SPLIT_ENTRIES)
    return 4 * heads * splits * (2 + value_width)
