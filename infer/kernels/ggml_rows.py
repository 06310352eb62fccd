"""The small operations: norms, rotations, routing, sums and look-ups, row by row."""

from typing import Any

import torch
from torch import Tensor

from infer.kernels.compiled_rows import (
    AddJob,
    EmbedJob,
    NormJob,
    RopeJob,
    RouteJob,
    SumJob,
    add,
    embed,
    rms_norm,
    rope,
    rope_pairs,
    route_sigmoid,
    weighted_sum,
)
from infer.kernels.ggml_library import GgmlLibrary
from infer.kernels.jobs import prepared_job
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.scratch import KernelBounds, Scratch, address_of
from infer.kernels.thread_team import ThreadTeam

# Fewer values than this are done sooner than another thread can be set to them.
_ITEM_VALUES = 16384


class GgmlRows:
    def __init__(
        self, library: GgmlLibrary, team: ThreadTeam, scratch: Scratch, bounds: KernelBounds
    ) -> None:
        self._library = library
        self._team = team
        self._bounds = bounds
        self._norm = prepared_job(NormJob, team.at)
        self._rope = prepared_job(RopeJob, team.at)
        self._route = prepared_job(RouteJob, team.at)
        self._sum = prepared_job(SumJob, team.at)
        self._add = prepared_job(AddJob, team.at)
        self._embed = prepared_job(EmbedJob, team.at)
        self._route.scratch = scratch.reserve(team.threads * bounds.experts * 8)

    def embed(self, matrix: QuantMatrix, ids: Tensor) -> Tensor:
        assert ids.dtype is torch.int64
        assert ids.is_contiguous()
        assert bool(((ids >= 0) & (ids < matrix.rows)).all())
        out = torch.empty((len(ids), matrix.columns))
        job = self._embed
        job.matrix, job.row_bytes = matrix.address, matrix.row_bytes
        job.to_float = self._library.functions(matrix.type_id).to_float
        job.ids, job.out, job.columns = ids.data_ptr(), out.data_ptr(), matrix.columns
        self._run(job, embed, len(ids), matrix.columns)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
        width = x.shape[-1]
        assert weight.shape == (width,)
        if out is None:
            out = torch.empty_like(x)
        job = self._norm
        job.x, job.weight, job.out = address_of(x), address_of(weight), address_of(out)
        job.width, job.eps = width, eps
        self._run(job, rms_norm, x.numel() // width, width)
        return out

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, start: int) -> None:
        self._rotate(rope, x, cos, sin, start, 0)

    def rope_pairs(self, x: Tensor, cos: Tensor, sin: Tensor, start: int, first: int) -> None:
        self._rotate(rope_pairs, x, cos, sin, start, first)

    def _rotate(
        self, worker: int, x: Tensor, cos: Tensor, sin: Tensor, start: int, first: int
    ) -> None:
        rows, heads, head_dim = x.shape
        positions, half = cos.shape
        assert sin.shape == cos.shape
        assert 0 <= first <= head_dim - 2 * half
        assert 0 <= start <= positions - rows
        job = self._rope
        job.x, job.cos, job.sin = address_of(x), address_of(cos), address_of(sin)
        job.heads, job.head_dim, job.half, job.start = heads, head_dim, half, start
        job.first = first
        self._run(job, worker, rows, heads * head_dim)

    def add(self, x: Tensor, added: Tensor) -> None:
        assert x.shape == added.shape
        rows, width = x.shape
        job = self._add
        job.x, job.added, job.width = address_of(x), address_of(added), width
        self._run(job, add, rows, width)

    def route_sigmoid(
        self, logits: Tensor, bias: Tensor | None, top_k: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        rows, experts = logits.shape
        assert 1 <= top_k <= experts <= self._bounds.experts
        assert bias is None or bias.shape == (experts,)
        ids = torch.empty((rows, top_k), dtype=torch.int32)
        weights = torch.empty((rows, top_k))
        job = self._route
        job.logits, job.bias = address_of(logits), 0 if bias is None else address_of(bias)
        job.ids, job.weights = ids.data_ptr(), weights.data_ptr()
        job.experts, job.top_k, job.scale = experts, top_k, scale
        self._run(job, route_sigmoid, rows, experts * (top_k + 1))
        return ids, weights

    def weighted_sum(self, rows: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        count, terms, width = rows.shape
        assert weights.shape == (count, terms)
        assert shared is None or shared.shape == (count, width)
        out = torch.empty((count, width))
        job = self._sum
        job.inputs, job.weights, job.out = address_of(rows), address_of(weights), out.data_ptr()
        job.shared = 0 if shared is None else address_of(shared)
        job.terms, job.width = terms, width
        self._run(job, weighted_sum, count, terms * width)
        return out

    def _run(self, job: Any, worker: int, rows: int, row_values: int) -> None:
        job.rows = rows
        job.item_rows = max(1, _ITEM_VALUES // row_values)
        job.items = -(-rows // job.item_rows)
        self._team.run(job, worker)
