"""Which experts to fetch ahead. Pure policy: what is predicted, and what is there, it is told.

Reading ahead is worth something only while the disk would be idle, which it is while the client
computes. So idle time is counted in slabs that the disk could have read in it, and each hint costs
one: with little idle time only the likeliest go out, with much of it those of later layers too.
How likely an expert is follows from how far ahead and at what rank it was predicted: of the absent
ones at that rank, the share that the router then chose. In every case known afterwards, hinted or
not, so nothing has to be tried out to learn it.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from infer.ahead.prefetch_trial import Trial
from infer.daemon.waits import IdleTime, Waits
from shared.stats_view import counted

MAX_DEPTH = 3
# A hint that is this unlikely is not sent however idle the disk: it puts something else out.
LEAST_LIKELY = 0.3
# Of the absent at one rank: the last 32 or so count.
LIKELIHOOD_RATE = 1 / 32
# Idle time older than this many tokens' layers is gone.
CREDIT_LAYERS = 2
DEPTH_WINDOW_TOKENS = 32
# At the farthest layer, a smaller share of the hints is not worth the arithmetic.
FAR_SHARE = 0.1

Integers = npt.NDArray[np.integer[Any]]


def margin_count(top_k: int) -> int:
    """How many experts beyond the top-k are predicted."""
    return max(2, top_k // 2)


class HintSink(Protocol):
    """Where hints go; infer.daemon.client.SlotClient."""

    waits: Waits

    def absent(self, layer: int, experts: Integers) -> npt.NDArray[np.bool_]: ...

    def is_complete(self, layer: int) -> bool: ...

    def hint(self, layer: int, experts: Integers, layers_ahead: int) -> None: ...


@dataclass
class PrefetchCounters:
    """predicted: experts a router chose in a layer that had been predicted `depth` ahead or less,
    by its nearest prediction; recalled: those of them among the top-k predicted, and `within`
    those among the margin too. hinted: experts; used: those of them that were chosen, and `ready`
    those of these that were there in time."""

    predicted: int = 0
    recalled: int = 0
    within: int = 0
    hinted: int = 0
    used: int = 0
    ready: int = 0
    messages: int = 0

    def copy(self) -> "PrefetchCounters":
        return replace(self)

    def since(self, before: "PrefetchCounters") -> "PrefetchCounters":
        earlier = asdict(before)
        return PrefetchCounters(**{k: v - earlier[k] for k, v in asdict(self).items()})


@dataclass(slots=True)
class _Forecast:
    """ranked: experts, the likeliest first; absent: which of them were not there."""

    distance: int
    ranked: list[int]
    absent: list[bool]


class _Group(NamedTuple):
    """Experts of one layer that may be hinted, and how likely each is."""

    distance: int
    layer: int
    experts: list[int]
    chances: list[float]


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
        self.depth = depth or 1
        self.top_k = top_k
        self.candidate_count = min(n_experts, top_k + margin_count(top_k))
        self._adapts = depth is None
        self._layers = tuple(layers)
        self._sink = sink
        self._clock_s = clock_s
        self._trial = Trial()
        self._idle = IdleTime(CREDIT_LAYERS * top_k)
        # Before anything is known: the top-k are likely, the margin just enough.
        margin = self.candidate_count - top_k
        self.likelihood = [
            [0.5] * top_k + [LEAST_LIKELY] * margin for _ in range(MAX_DEPTH)
        ]  # [distance - 1][rank]
        self._pending: dict[int, list[_Forecast]] = {}
        self._hinted: dict[int, set[int]] = {layer: set() for layer in self._layers}
        self._seem_complete = set(self._layers)
        self._last_layer = -1
        self._token_s: float | None = None
        self._token_count = 0
        self._step_count = self._spare_count = 0
        self._sent_counts = [0] * MAX_DEPTH

    @property
    def is_on(self) -> bool:
        return not self._adapts or self._trial.on

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
        self._idle.count(self._clock_s(), self._sink.waits)
        counters, chosen, hinted = self.counters, set(experts), self._hinted[layer]
        if hinted:
            used = list(hinted & chosen)
            counters.used += len(used)
            if used:
                late_count = int(self._sink.absent(layer, np.array(used)).sum())
                counters.ready += len(used) - late_count
            hinted.clear()
        forecasts = self._pending.pop(layer, None)
        if forecasts is None:
            return
        for forecast in forecasts:
            likelihood = self.likelihood[forecast.distance - 1]
            for rank, absent in enumerate(forecast.absent):
                if absent:
                    hit = forecast.ranked[rank] in chosen
                    likelihood[rank] += LIKELIHOOD_RATE * (hit - likelihood[rank])
        hits = [expert in chosen for expert in forecasts[-1].ranked]  # the nearest came last
        counters.predicted += len(chosen)
        counters.recalled += sum(hits[: self.top_k])
        counters.within += sum(hits)

    def forecast(self, forecasts: Mapping[tuple[int, int], Integers]) -> None:
        """Predictions by target, the likeliest first, `candidate_count` each; hints what pays."""
        groups = []
        for (distance, layer), ranked in forecasts.items():
            absent = self._sink.absent(layer, ranked).tolist()
            forecast = _Forecast(distance, ranked.tolist(), absent)
            self._pending.setdefault(layer, []).append(forecast)
            if not any(absent):
                self._seem_complete.add(layer)
                continue
            self._seem_complete.discard(layer)
            if group := self._group(layer, forecast):
                groups.append(group)
        self._step_count += 1
        if groups:
            self._send(groups)
        elif self._idle.slab_count >= 1:
            self._spare_count += 1

    def _group(self, layer: int, forecast: _Forecast) -> _Group | None:
        """Those that are likely enough, absent, and not hinted already."""
        likelihood, hinted = self.likelihood[forecast.distance - 1], self._hinted[layer]
        ranks = [
            rank
            for rank, expert in enumerate(forecast.ranked)
            if forecast.absent[rank] and likelihood[rank] >= LEAST_LIKELY and expert not in hinted
        ]
        if not ranks:
            return None
        experts = [forecast.ranked[rank] for rank in ranks]
        return _Group(forecast.distance, layer, experts, [likelihood[rank] for rank in ranks])

    def _send(self, groups: list[_Group]) -> None:
        """The one message that is worth the most: what is likely, and can be read until then."""
        affordable, least = self.candidate_count, 0.0
        if self._adapts:
            affordable = int(self._idle.slab_count)
            if affordable < 1:
                return
            chances = sorted((c for group in groups for c in group.chances), reverse=True)
            least = chances[min(affordable, len(chances)) - 1]
            self._spare_count += affordable > len(chances)

        def worth(group: _Group) -> float:
            time_slabs = group.distance * self._idle.slabs_a_layer
            return min(sum(c for c in group.chances if c >= least), time_slabs)

        best = max(groups, key=worth)
        pairs = zip(best.experts, best.chances, strict=True)
        experts = [expert for expert, chance in pairs if chance >= least][:affordable]
        if not experts:
            return
        self._sink.hint(best.layer, np.array(experts), best.distance)
        self._hinted[best.layer].update(experts)
        self._idle.slab_count -= len(experts)
        self._sent_counts[best.distance - 1] += len(experts)
        self.counters.hinted += len(experts)
        self.counters.messages += 1

    # Each token

    def _note_token(self, layer: int) -> None:
        """Whether this layer is the first of another token."""
        if layer <= self._last_layer:
            now_s = self._clock_s()
            if self._token_s is not None and self._adapts:
                self._trial.token_done(now_s - self._token_s)
                self._adapt_depth()
            self._forget_token()
            self._token_s = now_s
        self._last_layer = layer

    def _forget_token(self) -> None:
        for layer in self._pending:
            self._hinted[layer].clear()
        self._pending.clear()

    def _adapt_depth(self) -> None:
        self._token_count += 1
        if self._token_count < DEPTH_WINDOW_TOKENS:
            return
        # So far that there is time to read one slab.
        least_depth = min(MAX_DEPTH, math.ceil(1 / max(self._idle.slabs_a_layer, 1e-3)))
        if self._sent_counts[self.depth - 1] < FAR_SHARE * sum(self._sent_counts):
            self.depth -= 1
        elif 2 * self._spare_count > self._step_count:
            self.depth += 1
        self.depth = min(max(self.depth, least_depth), MAX_DEPTH)
        self._token_count = self._step_count = self._spare_count = 0
        self._sent_counts = [0] * MAX_DEPTH

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
        )
