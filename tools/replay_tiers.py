"""Two caches, one behind the other: GPU slots over host slots over the disk.

    inclusive   a slab goes from the disk to a host slot and from there to a GPU slot; each cache
                evicts by its own lookups, and the host's are what the GPU misses
    exclusive   besides, a host slot whose expert is in a GPU slot too is worth little: its heat
                counts a share only. A GPU victim without a copy in the host tier is written back
                there (D2H) if it is hotter than what would have to go for it.

Counts are of slabs; each one that the GPU misses crosses the bus to it (H2D).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from replay_policies import DaemonLfu
from replay_simulation import make_policy, misses_of
from replay_traces import Group, Trace

from shared.policy import HALF_LIFE_ROUNDS, LfuAgeing

MODES = ("inclusive", "exclusive")
COPY_WEIGHT = 1 / 16


@dataclass
class TierCounts:
    """Of the lookups behind the warm-up; all but `tokens` are slabs."""

    tokens: float = 0.0
    lookups: int = 0
    uploads: int = 0
    reads: int = 0
    write_backs: int = 0

    def pct(self, count: int) -> float:
        """Of the lookups."""
        return 100 * count / max(1, self.lookups)


@dataclass(frozen=True)
class TwoTiers:
    """How they are replayed. policies: the GPU's and the host's, lfu-ageing both if exclusive.

    warm_up: the share of the groups that is not counted, while the caches fill.
    copy_weight: of the heat of what is in both tiers, if exclusive; 0 for strictly exclusive.
    """

    mode: str = "inclusive"
    policies: tuple[str, str] = ("lfu-ageing", "lfu-ageing")
    warm_up: float = 0.0
    half_life_rounds: float = HALF_LIFE_ROUNDS
    copy_weight: float = COPY_WEIGHT

    def replay(self, trace: Trace, gpu_count: int, host_count: int) -> TierCounts:
        """With so many slots, empty at first."""
        if self.mode == "inclusive":
            return self._replay_inclusive(trace, gpu_count, host_count)
        if set(self.policies) != {"lfu-ageing"}:
            raise SystemExit("exclusive tiers are replayed with lfu-ageing only")
        first = self._first(trace)
        counts = TierCounts(tokens=(len(trace.groups) - first) / trace.n_layers)
        tiers = _Exclusive(trace, gpu_count, host_count, self)
        for number, (_, keys) in enumerate(trace.groups):
            tiers.serve(keys, counts if number >= first else TierCounts())
        return counts

    def _replay_inclusive(self, trace: Trace, gpu_count: int, host_count: int) -> TierCounts:
        """What the GPU misses is a trace of its own, which the host's cache is replayed with."""
        levels: list[tuple[Group, ...]] = [trace.groups]
        for slot_count, name in zip((gpu_count, host_count), self.policies, strict=True):
            level = trace.with_groups(levels[-1])
            policy = make_policy(name, level, slot_count, self.half_life_rounds)
            levels.append(tuple(misses_of(level, slot_count, policy)))
        first = self._first(trace)
        lookups, uploads, reads = (sum(len(keys) for _, keys in level[first:]) for level in levels)
        return TierCounts((len(trace.groups) - first) / trace.n_layers, lookups, uploads, reads)

    def _first(self, trace: Trace) -> int:
        return int(len(trace.groups) * self.warm_up)


class _Exclusive:
    """gpu, host: bool [key_count], what is in a slot of each tier."""

    def __init__(self, trace: Trace, gpu_count: int, host_count: int, how: TwoTiers) -> None:
        key_count = trace.n_layers * trace.n_experts
        self._gpu_policy = DaemonLfu(key_count, how.half_life_rounds)
        self._host_policy = LfuAgeing(key_count, how.half_life_rounds)
        self._copy_weight = how.copy_weight
        self._counts = (gpu_count, host_count)
        self._in_gpu: set[int] = set()
        self._host_count = 0
        self._gpu: npt.NDArray[np.bool_] = np.zeros(key_count, np.bool_)
        self._host: npt.NDArray[np.bool_] = np.zeros(key_count, np.bool_)
        self._one: npt.NDArray[np.uint32] = np.zeros(key_count, np.uint32)

    def serve(self, keys: tuple[int, ...], counts: TierCounts) -> None:
        counts.lookups += len(keys)
        for key in keys:
            if not self._gpu[key]:
                counts.uploads += 1
                self._heat_up(key)
                if not self._host[key]:
                    counts.reads += 1
                    self._make_room(keys)
                    self._enter_host(key)
                self._make_gpu_room(keys, counts)
                self._gpu[key] = True
                self._in_gpu.add(key)
            self._gpu_policy.look_up(key)

    def _heat_up(self, key: int) -> None:
        self._one[key] = 1
        self._host_policy.absorb(self._one)
        self._one[key] = 0

    def _make_gpu_room(self, serving: tuple[int, ...], counts: TierCounts) -> None:
        while len(self._in_gpu) >= self._counts[0]:
            gone = self._gpu_policy.victim(set(serving))
            self._in_gpu.remove(gone)
            self._gpu[gone] = False
            heat = float(self._host_policy.heat[gone])
            if not self._host[gone] and self._make_room(serving, heat):
                self._enter_host(gone)
                counts.write_backs += 1

    def _enter_host(self, key: int) -> None:
        self._host[key] = True
        self._host_count += 1

    def _make_room(self, serving: tuple[int, ...], heat: float = np.inf) -> bool:
        """A free host slot for what is of that heat; False if all that is there is hotter."""
        if self._host_count < self._counts[1]:
            return True
        evictable = self._host.copy()
        evictable[list(serving)] = False
        keys = np.flatnonzero(evictable)
        worth = self._host_policy.heat[keys] * np.where(self._gpu[keys], self._copy_weight, 1)
        coldest = int(worth.argmin())
        if worth[coldest] > heat:
            return False
        self._host[keys[coldest]] = False
        self._host_count -= 1
        return True
