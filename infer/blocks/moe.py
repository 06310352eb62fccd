"""The mixture-of-experts block: router, experts from the daemon's slots, shared expert.

Every (token, rank) pair of the router's choice has a row of its own for its expert's output, and
the rows are summed in router order: the result has the same bits whatever was resident, and in
whatever waves the experts came.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infer.blocks.ffn import DenseFfn
from infer.kernels.interface import ExpertBatch, ExpertFormat, Kernels
from infer.kernels.quant_matrix import QuantMatrix

Tap = Callable[[str, Tensor], None]


class ExpertSource(Protocol):
    """Where slabs come from; infer.client.SlotClient."""

    def wave_experts(self, layer: int) -> int: ...

    def read(
        self,
        layer: int,
        experts: npt.NDArray[np.integer[Any]],
        use_counts: npt.NDArray[np.integer[Any]] | int,
        compute: Callable[[npt.NDArray[np.intp], npt.NDArray[np.int64]], None],
    ) -> None: ...


@dataclass(frozen=True)
class Routing:
    """How the router's logits become choices: sigmoid, top-k of the biased, renormalised."""

    top_k: int
    scale: float


class MoeFfn:
    """x [n, width] -> [n, width]. `shared` is the shared expert's block, if there is one."""

    def __init__(
        self,
        kernels: Kernels,
        source: ExpertSource,
        layer: int,
        routing: Routing,
        router: QuantMatrix,
        bias: Tensor | None,
        experts: ExpertFormat,
        shared: DenseFfn | None,
    ) -> None:
        self._kernels = kernels
        self._source = source
        self._layer = layer
        self._routing = routing
        self._router = kernels.group([router])
        self._bias = bias
        self._format = experts
        self._shared = shared

    def forward(self, x: Tensor, exact: bool, tap: Tap | None = None) -> Tensor:
        kernels, routing = self._kernels, self._routing
        # The router decides; it is always computed in float32.
        logits = kernels.linear(x, self._router, exact=True)[0]
        ids, weights = kernels.route_sigmoid(logits, self._bias, routing.top_k, routing.scale)
        if tap is not None:
            tap(f"router_logits.{self._layer}", logits)
            tap(f"router_idx.{self._layer}", ids)
            tap(f"router_w.{self._layer}", weights)
        shared = self._shared.forward(x, exact) if self._shared else None
        rows = torch.empty((*ids.shape, x.shape[1]), dtype=x.dtype, device=x.device)
        for wave in _waves(ids.cpu().numpy(), self._source.wave_experts(self._layer)):
            self._run_wave(wave, x, rows, exact)
        return kernels.weighted_sum(rows, weights, shared)

    def _run_wave(self, wave: "Wave", x: Tensor, rows: Tensor, exact: bool) -> None:
        def compute(places: npt.NDArray[np.intp], addresses: npt.NDArray[np.int64]) -> None:
            part = wave.at(places)
            gate, up, down = np.ascontiguousarray(addresses.T)
            batch = ExpertBatch(self._format, part.pairs, part.group_start, gate, up, down)
            self._kernels.experts(x, batch, rows, exact)

        use_counts = np.diff(wave.group_start)
        self._source.read(self._layer, wave.experts, use_counts, compute)


@dataclass(frozen=True)
class Wave:
    """Experts of one section, and the pairs each works on; see kernels.interface.ExpertBatch."""

    experts: npt.NDArray[np.int32]
    pairs: npt.NDArray[np.int32]
    group_start: npt.NDArray[np.int32]

    def at(self, places: npt.NDArray[np.intp]) -> "Wave":
        """The experts at some places, ascending, with their pairs."""
        if len(places) == len(self.experts):
            return self
        counts = np.diff(self.group_start)[places]
        group_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        sources = np.repeat(self.group_start[places] - group_start[:-1], counts)
        pairs = self.pairs[sources + np.arange(group_start[-1], dtype=np.int32)]
        return Wave(self.experts[places], pairs, group_start)


def _waves(ids: npt.NDArray[np.int32], wave_experts: int) -> list[Wave]:
    """The touched experts in ascending order, at most `wave_experts` a wave; ids [n, top_k]."""
    flat = ids.reshape(-1)
    pairs = np.argsort(flat, kind="stable").astype(np.int32)
    experts, starts = np.unique(flat[pairs], return_index=True)
    bounds = np.append(starts, len(flat)).astype(np.int32)
    waves = []
    for first in range(0, len(experts), wave_experts):
        last = min(first + wave_experts, len(experts))
        begin, end = bounds[first], bounds[last]
        waves.append(Wave(experts[first:last], pairs[begin:end], bounds[first : last + 1] - begin))
    return waves
