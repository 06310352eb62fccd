"""Attention over a cache; `compiled_attention` says how it is cut."""

import torch
from torch import Tensor

from infer.kernels.compiled_attention import (
    SPLIT_POSITIONS,
    AttentionJob,
    attend_splits,
    merge_splits,
)
from infer.kernels.ggml_library import GgmlLibrary
from infer.kernels.jobs import prepared_job
from infer.kernels.scratch import KernelBounds, Scratch, address_of
from infer.kernels.thread_team import ThreadTeam
from shared.quants import TensorType

# Partial results of as many rows as fit here are computed before they are merged.
_PARTIAL_BYTES = 8 << 20


class GgmlAttention:
    def __init__(
        self, library: GgmlLibrary, team: ThreadTeam, scratch: Scratch, bounds: KernelBounds
    ) -> None:
        self._half_to_float = library.functions(TensorType.F16).to_float
        one_row = _partial_bytes(bounds.heads, bounds.head_dim, bounds.context)
        self._partial_bytes = max(one_row, _PARTIAL_BYTES)
        self._bounds = bounds
        self._team = team
        self._job = prepared_job(AttentionJob, team.at)
        self._job.partial = scratch.reserve(self._partial_bytes)
        self._job.tile_bytes = 4 * SPLIT_POSITIONS * (1 + 2 * bounds.head_dim)
        self._job.tiles = scratch.reserve(team.threads * self._job.tile_bytes)

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
        rows, heads, head_dim = q.shape
        context, kv_heads, _ = keys.shape
        end = start + rows
        assert keys.shape == values.shape == (context, kv_heads, head_dim)
        assert heads % kv_heads == 0
        assert 0 <= start < end <= context <= self._bounds.context
        assert heads <= self._bounds.heads
        assert head_dim <= self._bounds.head_dim
        out = torch.empty_like(q)
        job = self._job
        job.keys, job.values, job.to_float = self._cache(keys), self._cache(values), 0
        if keys.dtype is torch.float16:
            job.to_float = self._half_to_float
        job.heads, job.kv_heads, job.head_dim, job.scale = heads, kv_heads, head_dim, scale
        queries, outputs, row_bytes = address_of(q), out.data_ptr(), heads * head_dim * 4
        block = max(1, self._partial_bytes // _partial_bytes(heads, head_dim, end))
        for first in range(0, rows, block):
            job.rows = min(block, rows - first)
            job.start = start + first
            job.queries, job.out = queries + first * row_bytes, outputs + first * row_bytes
            job.splits = -(-(job.start + job.rows) // SPLIT_POSITIONS)
            job.items = job.splits * kv_heads
            self._team.run(job, attend_splits)
            job.items = job.rows * heads
            self._team.run(job, merge_splits)
        return out

    @staticmethod
    def _cache(cache: Tensor) -> int:
        assert cache.dtype in (torch.float32, torch.float16)
        assert cache.is_contiguous()
        return cache.data_ptr()


def _partial_bytes(heads: int, head_dim: int, context: int) -> int:
    splits = -(-context // SPLIT_POSITIONS)
    return 4 * heads * splits * (2 + head_dim)
