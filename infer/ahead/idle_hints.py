"""Hints where slots are filled from the disk: as many as it has time for.

Reading ahead is worth something only while the disk would be idle, which it is while the client
computes. So idle time is counted in slabs that the disk could have read in it, and each hint costs
one: with little idle time only the likeliest go out, with much of it those of later layers too.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from infer.daemon.waits import IdleTime, Waits

MAX_DEPTH = 3
# Idle time older than this many tokens' layers is gone.
CREDIT_LAYERS = 2
DEPTH_WINDOW_TOKENS = 32
# At the farthest layer, a smaller share of the hints is not worth the arithmetic.
FAR_SHARE = 0.1


class Group(NamedTuple):
    """Experts of one layer that may be hinted, and how likely each is."""

    distance: int
    layer: int
    experts: list[int]
    chances: list[float]


class IdleHints:
    """depth: layers ahead, always, and as many hints as are likely enough; None to adapt both."""

    def __init__(self, top_k: int, candidate_count: int, depth: int | None) -> None:
        self.depth = depth or 1
        self._adapts = depth is None
        self._most = candidate_count
        self._idle = IdleTime(CREDIT_LAYERS * top_k)
        self._token_count = self._step_count = self._spare_count = 0
        self._sent_counts = [0] * MAX_DEPTH

    def layer_passed(self, now_s: float, waits: Waits) -> None:
        self._idle.count(now_s, waits)

    def best(self, groups: Sequence[Group]) -> Group | None:
        """The one message that is worth the most: what is likely, and can be read until then."""
        self._step_count += 1
        if not groups:
            self._spare_count += self._idle.slab_count >= 1
            return None
        affordable, least = self._most, 0.0
        if self._adapts:
            affordable = int(self._idle.slab_count)
            if affordable < 1:
                return None
            chances = sorted((c for group in groups for c in group.chances), reverse=True)
            least = chances[min(affordable, len(chances)) - 1]
            self._spare_count += affordable > len(chances)

        def worth(group: Group) -> float:
            time_slabs = group.distance * self._idle.slabs_a_layer
            return min(sum(c for c in group.chances if c >= least), time_slabs)

        best = max(groups, key=worth)
        pairs = zip(best.experts, best.chances, strict=True)
        experts = [expert for expert, chance in pairs if chance >= least][:affordable]
        if not experts:
            return None
        self._idle.slab_count -= len(experts)
        self._sent_counts[best.distance - 1] += len(experts)
        return best._replace(experts=experts)

    def token_done(self) -> None:
        """Perhaps another depth, if it adapts."""
        self._token_count += 1
        if not self._adapts or self._token_count < DEPTH_WINDOW_TOKENS:
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
