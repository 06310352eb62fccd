"""Eviction policies as a replay needs them; the daemon's own stands among them.

A policy is told of every lookup and names victims. `protected` are the keys of the group that is
being served: they are never evicted.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Collection
from typing import Protocol

import numpy as np

from shared.policy import LfuAgeing


class Policy(Protocol):
    def look_up(self, key: int) -> None:
        """A lookup, in order; the key is in the cache from now on, if it was not already."""

    def victim(self, protected: Collection[int]) -> int:
        """The key that leaves the cache; the policy forgets that it is in."""


class Lru:
    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def look_up(self, key: int) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def victim(self, protected: Collection[int]) -> int:
        key = next(key for key in self._order if key not in protected)
        del self._order[key]
        return key


class DaemonLfu:
    """shared.policy.LfuAgeing; a half-life of 0 rounds never ages."""

    def __init__(self, key_count: int, half_life_rounds: float) -> None:
        self._policy = LfuAgeing(key_count, half_life_rounds or 1e12)
        self._inside = np.zeros(key_count, np.bool_)
        self._uses = np.zeros(key_count, np.uint32)

    def look_up(self, key: int) -> None:
        self._inside[key] = True
        self._uses[key] += 1

    def victim(self, protected: Collection[int]) -> int:
        if self._uses.any():
            self._policy.absorb(self._uses)
            self._uses[:] = 0
        guarded = list(protected)
        were_inside = self._inside[guarded]
        self._inside[guarded] = False
        keys = np.flatnonzero(self._inside).astype(np.int32)
        key = int(keys[self._policy.coldest(keys, 1)[0]])
        self._inside[guarded] = were_inside
        self._inside[key] = False
        return key


class Belady:
    """The one that will be needed again last; it knows the whole future."""

    def __init__(self, future: dict[int, deque[int]]) -> None:
        self._future = future
        self._heap: list[tuple[float, int]] = []
        self._next: dict[int, float] = {}

    def look_up(self, key: int) -> None:
        uses = self._future[key]
        uses.popleft()
        self._next[key] = uses[0] if uses else float("inf")
        heapq.heappush(self._heap, (-self._next[key], key))

    def victim(self, protected: Collection[int]) -> int:
        held = []
        while True:
            when, key = heapq.heappop(self._heap)
            if self._next.get(key) != -when:
                continue  # an older entry of a key used since
            if key in protected:
                held.append((when, key))
                continue
            for entry in held:
                heapq.heappush(self._heap, entry)
            del self._next[key]
            return key


class Slru:
    """Segmented LRU: a second lookup moves a key to the protected segment."""

    def __init__(self, capacity_count: int, protected_share: float = 0.8) -> None:
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._safe: OrderedDict[int, None] = OrderedDict()
        self._safe_max = max(1, int(capacity_count * protected_share))

    def look_up(self, key: int) -> None:
        if key in self._safe:
            self._safe.move_to_end(key)
        elif key in self._probation:
            del self._probation[key]
            self._safe[key] = None
            if len(self._safe) > self._safe_max:
                demoted, _ = self._safe.popitem(last=False)
                self._probation[demoted] = None
        else:
            self._probation[key] = None

    def victim(self, protected: Collection[int]) -> int:
        for segment in (self._probation, self._safe):
            for key in segment:
                if key not in protected:
                    del segment[key]
                    return key
        raise AssertionError("everything is protected")


class S3Fifo:
    """Small, main and ghost queues (Yang et al., SOSP 2023): 10% small, two bits of use."""

    def __init__(self, capacity_count: int) -> None:
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghost: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}
        self._small_max = max(1, capacity_count // 10)
        self._ghost_max = max(1, capacity_count - self._small_max)

    def look_up(self, key: int) -> None:
        if key in self._uses:
            self._uses[key] = min(3, self._uses[key] + 1)
        elif key in self._ghost:
            del self._ghost[key]
            self._main[key] = None
            self._uses[key] = 0
        else:
            self._small[key] = None
            self._uses[key] = 0

    def victim(self, protected: Collection[int]) -> int:
        while True:
            from_small = len(self._small) > self._small_max or not self._main
            queue = self._small if from_small else self._main
            key = next((k for k in queue if k not in protected), None)
            if key is None:
                queue = self._main if from_small else self._small
                key = next(k for k in queue if k not in protected)
                from_small = not from_small
            del queue[key]
            if from_small and self._uses[key] > 1:
                self._main[key] = None
            elif not from_small and self._uses[key] > 0:
                self._main[key] = None
                self._uses[key] -= 1
            else:
                if from_small:
                    self._ghost[key] = None
                    if len(self._ghost) > self._ghost_max:
                        self._ghost.popitem(last=False)
                del self._uses[key]
                return key


class WTinyLfu:
    """A window LRU of 1% before a main SLRU that only takes what is used more than its victim."""

    def __init__(self, capacity_count: int, sample_rounds: int = 10) -> None:
        self._window: OrderedDict[int, None] = OrderedDict()
        self._window_max = max(1, capacity_count // 100)
        self._main_max = max(1, capacity_count - self._window_max)
        self._main = Slru(self._main_max)
        self._in_main: set[int] = set()
        self._counts: dict[int, int] = {}
        self._sample_max = sample_rounds * capacity_count
        self._sampled = 0

    def look_up(self, key: int) -> None:
        self._counts[key] = self._counts.get(key, 0) + 1
        self._sampled += 1
        if self._sampled >= self._sample_max:
            self._sampled //= 2
            self._counts = {k: c // 2 for k, c in self._counts.items() if c > 1}
        if key in self._in_main:
            self._main.look_up(key)
        else:
            self._window[key] = None
            self._window.move_to_end(key)
            if len(self._window) > self._window_max and len(self._in_main) < self._main_max:
                self._admit(self._window.popitem(last=False)[0])

    def victim(self, protected: Collection[int]) -> int:
        while len(self._window) > self._window_max or not self._in_main:
            candidate = next((k for k in self._window if k not in protected), None)
            if candidate is None:
                break
            del self._window[candidate]
            if not self._in_main:
                self._admit(candidate)
                continue
            try:
                loser = self._main.victim(protected)
            except AssertionError:
                return candidate
            if self._counts.get(candidate, 0) > self._counts.get(loser, 0):
                self._in_main.remove(loser)
                self._admit(candidate)
                return loser
            self._main.look_up(loser)
            return candidate
        key = self._main.victim(protected)
        self._in_main.remove(key)
        return key

    def _admit(self, key: int) -> None:
        self._in_main.add(key)
        self._main.look_up(key)
