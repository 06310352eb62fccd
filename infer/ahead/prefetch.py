"""Which experts to fetch ahead. Pure policy: what is predicted, and what is there, it is told.

Slots that the disk fills are hinted for by the disk's idle time: see infer/ahead/idle_hints.py. A
GPU's slots are filled from RAM. There the bus is idle from the last copy of a layer until the next
layer's router has been answered, time for one or two slabs; the daemon takes what was hinted in
that order, and drops what it has not begun when the router has spoken. So what is hinted beyond
that costs nothing, and what may be copied in vain has to be likely. What the disk has to read is
waited for longest: it is asked for less likely experts too, as many as it has time for.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from infer.ahead.idle_hints import MAX_DEPTH, Group, IdleHints
from infer.ahead.likelihood import LEAST_LIKELY, Likelihood
from infer.ahead.prefetch_trial import Trial
from infer.ahead.read_allowance import ReadAllowance
from infer.daemon.waits import Waits
from shared.stats_view import counted

# For a slot of a GPU.
LEAST_LIKELY_UPLOAD = 0.6

Integers = npt.NDArray[np.integer[Any]]


def margin_count(top_k: int) -> int:
    """How many experts beyond the top-k are predicted."""
    return max(2, top_k // 2)


class HintSink(Protocol):
    """Where hints go; infer.daemon.client.SlotClient."""

    waits: Waits

    @property
    def has_source(self) -> bool:
        """Whether our slots are filled from another tier's, which hints can be for alone."""

    @property
    def drive_us(self) -> tuple[int, int]:
        """Idle time of the drive so far, and the time that it is of."""

    def absent(self, layer: int, experts: Integers) -> npt.NDArray[np.bool_]: ...

    def unread(self, layer: int, experts: Integers) -> npt.NDArray[np.bool_]: ...

    def is_complete(self, layer: int) -> bool: ...

    def hint(self, layer: int, experts: Integers, layers_ahead: int, upload_count: int) -> None: ...


@dataclass
class PrefetchCounters:
    """predicted: experts a router chose in a layer that had been predicted `depth` ahead or less,
    by its nearest prediction; recalled: those of them among the top-k predicted, and `within`
    those among the margin too. hinted: experts, for slots of the tier that is computed from; used:
    those of them that were chosen, and `ready` those of these that were there in time. reads:
    experts hinted to the tier below alone."""

    predicted: int = 0
    recalled: int = 0
    within: int = 0
    hinted: int = 0
    used: int = 0
    ready: int = 0
    reads: int = 0
    messages: int = 0

    def copy(self) -> "PrefetchCounters":
        return replace(self)

    def since(self, before: "PrefetchCounters") -> "PrefetchCounters":
        earlier = asdict(before)
        return PrefetchCounters(**{k: v - earlier[k] for k, v in asdict(self).items()})


@dataclass(slots=True)
class _Forecast:
    """ranked: experts, the likeliest first; absent: which of them were in no slot of ours, unread:
    which of these in no other either."""

    distance: int
    ranked: list[int]
    absent: list[bool]
    unread: list[bool]


class Prefetch:
    """For one sequence, told of each MoE layer in order: `targets`, `chosen`, `forecast`.

    layers: those with experts, ascending. depth: layers ahead, always and as many hints as are
    likely enough; None to adapt it, and the hints, to what pays.
    """

    # A dozen experts a layer: lists and sets of Python's are faster here than arrays.

    def __init__(
        self,
        layers: Sequence[int],
        n_experts: int,
        top_k: int,
        sink: HintSink,
        depth: int | None = None,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert depth is None or 1 <= depth <= MAX_DEPTH
        self.counters = PrefetchCounters()
        self.top_k = top_k
        self.candidate_count = min(n_experts, top_k + margin_count(top_k))
        self._fixed_depth = depth
        self._layers = tuple(layers)
        self._sink = sink
        self._clock_s = clock_s
        self._trial = Trial()
        self._idle_hints = IdleHints(top_k, self.candidate_count, depth)
        self._allowance = ReadAllowance(self.candidate_count)
        self.likelihood = Likelihood(top_k, self.candidate_count, MAX_DEPTH)
        self.read_likelihood = Likelihood(top_k, self.candidate_count, MAX_DEPTH)
        self._pending: dict[int, list[_Forecast]] = {}
        self._hinted: dict[int, set[int]] = {layer: set() for layer in self._layers}
        self._read: dict[int, set[int]] = {layer: set() for layer in self._layers}
        self._seem_complete = set(self._layers)
        self._last_layer = -1
        self._token_s: float | None = None

    @property
    def is_on(self) -> bool:
        return self._fixed_depth is not None or self._trial.on

    @property
    def depth(self) -> int:
        """Layers ahead. Where the bus sets the pace, looking farther brings nothing."""
        return self._fixed_depth or (1 if self._sink.has_source else self._idle_hints.depth)

    def pause(self) -> None:
        """Something else than decoding comes between: nothing is remembered of this token."""
        self._forget_token()
        self._token_s, self._last_layer = None, -1

    # Each layer

    def targets(self, layer: int) -> Sequence[tuple[int, int]]:
        """(how far ahead, layer) of those to predict at `layer`, which may have no experts."""
        self._note_token(layer)
        if not self.is_on:
            return ()
        first = bisect_right(self._layers, layer)
        ahead = enumerate(self._layers[first : first + self.depth], 1)
        return [pair for pair in ahead if not self._is_complete(pair[1])]

    def _is_complete(self, layer: int) -> bool:
        """Looked at only where all was there the last time."""
        return layer in self._seem_complete and self._sink.is_complete(layer)

    def chosen(self, layer: int, experts: Sequence[int]) -> None:
        """What the router of `layer` has chosen, each once, its section having begun."""
        self._idle_hints.layer_passed(self._clock_s(), self._sink.waits)
        if self._sink.has_source:
            self._allowance.layer_passed(self._sink.drive_us)
        counters, chosen, hinted = self.counters, set(experts), self._hinted[layer]
        if hinted:
            used = list(hinted & chosen)
            counters.used += len(used)
            if used:
                late_count = int(self._sink.absent(layer, np.array(used)).sum())
                counters.ready += len(used) - late_count
        self._forget_hints(layer)
        forecasts = self._pending.pop(layer, None)
        if forecasts is None:
            return
        for f in forecasts:
            self.likelihood.learn(f.distance, f.ranked, f.absent, chosen)
            self.read_likelihood.learn(f.distance, f.ranked, f.unread, chosen)
        hits = [expert in chosen for expert in forecasts[-1].ranked]  # the nearest came last
        counters.predicted += len(chosen)
        counters.recalled += sum(hits[: self.top_k])
        counters.within += sum(hits)

    def forecast(self, forecasts: Mapping[tuple[int, int], Integers]) -> None:
        """Predictions by target, the likeliest first, `candidate_count` each; hints what pays."""
        has_source, groups = self._sink.has_source, []
        for (distance, layer), ranked in forecasts.items():
            absent = self._sink.absent(layer, ranked).tolist()
            unread = self._sink.unread(layer, ranked).tolist() if has_source else absent
            forecast = _Forecast(distance, ranked.tolist(), absent, unread)
            self._pending.setdefault(layer, []).append(forecast)
            if not any(absent):
                self._seem_complete.add(layer)
                continue
            self._seem_complete.discard(layer)
            if has_source:
                self._hint_tiers(layer, forecast)
            elif group := self._group(layer, forecast):
                groups.append(group)
        if not has_source and (best := self._idle_hints.best(groups)):
            self._hint(best.layer, best.distance, best.experts)

    def _group(self, layer: int, forecast: _Forecast) -> Group | None:
        """Those that are likely enough, absent, and not hinted already."""
        likelihood, hinted = self.likelihood.at(forecast.distance), self._hinted[layer]
        ranks = [
            rank
            for rank, expert in enumerate(forecast.ranked)
            if forecast.absent[rank] and likelihood[rank] >= LEAST_LIKELY and expert not in hinted
        ]
        if not ranks:
            return None
        experts = [forecast.ranked[rank] for rank in ranks]
        return Group(forecast.distance, layer, experts, [likelihood[rank] for rank in ranks])

    def _hint_tiers(self, layer: int, forecast: _Forecast) -> None:
        """What is likely of the next layer for our own slots, what is unread for the tier below."""
        near = self.likelihood.at(forecast.distance)
        far = self.read_likelihood.at(forecast.distance)
        hinted, read = self._hinted[layer], self._read[layer]
        likely: list[tuple[int, bool, bool]] = []  # expert, for our slots, to be read
        for rank, expert in enumerate(forecast.ranked):
            is_near = forecast.distance == 1 and near[rank] >= LEAST_LIKELY_UPLOAD
            is_fresh = forecast.unread[rank] and expert not in read
            is_wanted = is_near or (is_fresh and far[rank] >= LEAST_LIKELY)
            if is_wanted and forecast.absent[rank] and expert not in hinted:
                likely.append((expert, is_near, is_fresh))
        fresh = [expert for expert, _, is_fresh in likely if is_fresh]
        if self._fixed_depth is None:
            fresh = fresh[: self._allowance.take(len(fresh))]
        read.update(fresh)
        # What may not be read cannot be uploaded either.
        uploads = [e for e, is_near, is_fresh in likely if is_near and (e in read or not is_fresh)]
        self._hint(layer, forecast.distance, uploads, [e for e in fresh if e not in uploads])

    def _hint(
        self, layer: int, distance: int, experts: list[int], reads: Sequence[int] = ()
    ) -> None:
        """experts: for our own slots; reads: for the tier below alone."""
        if not experts and not reads:
            return
        self._sink.hint(layer, np.array([*experts, *reads]), distance, len(experts))
        self._hinted[layer].update(experts)
        self.counters.hinted += len(experts)
        self.counters.reads += len(reads)
        self.counters.messages += 1

    # Each token

    def _note_token(self, layer: int) -> None:
        """Whether this layer is the first of another token."""
        if layer <= self._last_layer:
            now_s = self._clock_s()
            if self._token_s is not None:
                self._trial.token_done(now_s - self._token_s)
                self._idle_hints.token_done()
            self._forget_token()
            self._token_s = now_s
        self._last_layer = layer

    def _forget_token(self) -> None:
        for layer in self._pending:
            self._forget_hints(layer)
        self._pending.clear()

    def _forget_hints(self, layer: int) -> None:
        self._hinted[layer].clear()
        self._read[layer].clear()

    # Looking

    def values(self, before: PrefetchCounters | None = None) -> dict[str, Any]:
        """For statistics: the counters' growth, and what the policy has come to."""
        counters = self.counters.since(before or PrefetchCounters())
        recall = counters.recalled / counters.predicted if counters.predicted else None
        return {**asdict(counters), "recall": recall, "depth": self.depth if self.is_on else 0}

    def describe(self, before: PrefetchCounters | None = None) -> str:
        """A line for people; "" where nothing has been predicted."""
        c = self.counters.since(before or PrefetchCounters())
        if not c.predicted:
            return ""
        state = (
            counted(self.depth, "layer") if self.is_on else "off, as it costs more than it brings"
        )
        return (
            f"{state}; {100 * c.recalled / c.predicted:.0f}% of the choices foreseen; {c.hinted}"
            f" experts hinted, of which {c.used} were chosen, {c.ready} of them in time"
            + (f"; {c.reads} more to be read into RAM" if c.reads else "")
        )
