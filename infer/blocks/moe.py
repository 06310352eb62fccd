"""The mixture-of-experts block: router, experts from the daemon's slots, shared expert.

Every (token, rank) pair of the router's choice has a row of its own for its expert's output, and
the rows are summed in router order: the result has the same bits whatever was resident, and in
whatever waves the experts came.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infer.blocks.ffn import DenseFfn
from infer.kernels.interface import ExpertBatch, ExpertFormat, Kernels
from infer.kernels.quant_matrix import QuantMatrix

Tap = Callable[[str, Tensor], None]
# Takes a router's logits [n, experts] and choice int32 [n, top_k], once its misses are asked for.
Look = Callable[[Tensor, npt.NDArray[np.int32]], None]


class ExpertSource(Protocol):
    """Where slabs come from; infer.daemon.client.SlotClient, or infer.uploads.client."""

    def wave_experts(self, layer: int) -> int: ...

    def absent(
        self, layer: int, experts: npt.NDArray[np.integer[Any]]
    ) -> npt.NDArray[np.bool_]: ...

    def unread(
        self, layer: int, experts: npt.NDArray[np.integer[Any]]
    ) -> npt.NDArray[np.bool_]: ...

    def hint(
        self, layer: int, experts: npt.NDArray[np.integer[Any]], layers_ahead: int
    ) -> None: ...

    def read(
        self,
        layer: int,
        experts: npt.NDArray[np.integer[Any]],
        use_counts: npt.NDArray[np.integer[Any]] | int,
        compute: Callable[[npt.NDArray[np.intp], npt.NDArray[np.int64]], None],
        meanwhile: Callable[[], None],
    ) -> None: ...


class Ahead(Protocol):
    """Has the disk read ahead; infer.ahead.prompt_ahead.PromptAhead."""

    def chosen(self, layer: int, experts: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]:
        """What a router has chosen, each once; which of it have been hinted."""

    def advance(self, layer: int, waves: Sequence[npt.NDArray[np.integer[Any]]]) -> None:
        """A wave has been asked for; `waves` of the layer are yet to come."""


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
        self.layer = layer
        self.routing = routing
        self.router = kernels.group([router])
        self.bias = bias
        self.format = experts
        self.shared = shared

    def forward(
        self,
        x: Tensor,
        exact: bool,
        tap: Tap | None = None,
        look: Look | None = None,
        ahead: Ahead | None = None,
    ) -> Tensor:
        kernels, routing = self._kernels, self.routing
        # The router decides; it is always computed in float32.
        logits = kernels.linear(x, self.router, exact=True)[0]
        ids, weights = kernels.route_sigmoid(logits, self.bias, routing.top_k, routing.scale)
        if tap is not None:
            tap(f"router_logits.{self.layer}", logits)
            tap(f"router_idx.{self.layer}", ids)
            tap(f"router_w.{self.layer}", weights)
        rows = torch.empty((*ids.shape, x.shape[1]), dtype=x.dtype, device=x.device)
        choice = ids.cpu().numpy()
        shared: Tensor | None = None

        def meanwhile(number: int) -> None:
            """What does not need the experts, while those of a wave are read."""
            nonlocal shared
            if ahead is not None:
                ahead.advance(self.layer, [wave.experts for wave in waves[number + 1 :]])
            if number:
                return
            if look is not None:
                look(logits, choice)
            shared = self.shared.forward(x, exact) if self.shared else None

        waves = _waves(choice, self._source, self.layer, ahead)
        for number, wave in enumerate(waves):
            self._run_wave(wave, x, rows, exact, partial(meanwhile, number))
        return kernels.weighted_sum(rows, weights, shared)

    def _run_wave(
        self, wave: "Wave", x: Tensor, rows: Tensor, exact: bool, meanwhile: Callable[[], None]
    ) -> None:
        def compute(places: npt.NDArray[np.intp], addresses: npt.NDArray[np.int64]) -> None:
            part = wave.at(places)
            gate, up, down = np.ascontiguousarray(addresses.T)
            batch = ExpertBatch(self.format, part.pairs, part.group_start, gate, up, down)
            self._kernels.experts(x, batch, rows, exact)

        use_counts = np.diff(wave.group_start)
        self._source.read(self.layer, wave.experts, use_counts, compute, meanwhile)


@dataclass(frozen=True)
class Wave:
    """Experts of one section, and the pairs each works on; see kernels.interface.ExpertBatch."""

    experts: npt.NDArray[np.int32]
    pairs: npt.NDArray[np.int32]
    group_start: npt.NDArray[np.int32]

    def at(self, places: npt.NDArray[np.intp]) -> "Wave":
        """The experts at some places, in that order, with their pairs; all places are ascending."""
        if len(places) == len(self.experts):
            return self
        counts = np.diff(self.group_start)[places]
        group_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        sources = np.repeat(self.group_start[places] - group_start[:-1], counts)
        pairs = self.pairs[sources + np.arange(group_start[-1], dtype=np.int32)]
        return Wave(self.experts[places], pairs, group_start)


def _waves(
    ids: npt.NDArray[np.int32], source: ExpertSource, layer: int, ahead: Ahead | None = None
) -> list[Wave]:
    """The touched experts, as many a wave as the source allows; ids [n, top_k].

    Of several waves the first have those that are there, before the others put them out, then
    those that the disk need not read: they are brought from a tier below while it reads the rest.
    Of each kind the hinted ones go first, whose slots are held until they are used.
    """
    flat = ids.reshape(-1)
    # A router has at most MAX_EXPERTS choices; 16 bits are sorted six times as fast as 32.
    pairs = np.argsort(flat.astype(np.uint16), kind="stable").astype(np.int32)
    experts, starts = np.unique(flat[pairs], return_index=True)
    whole = Wave(experts, pairs, np.append(starts, len(flat)).astype(np.int32))
    hinted = ahead.chosen(layer, experts) if ahead is not None else np.zeros(len(experts), bool)
    wave_experts = source.wave_experts(layer)
    if len(experts) <= wave_experts:
        return [whole]
    cost = source.absent(layer, experts).astype(np.int8) + source.unread(layer, experts)
    order = np.argsort(2 * cost - hinted, kind="stable")
    return [whole.at(order[i : i + wave_experts]) for i in range(0, len(order), wave_experts)]
