"""Choosing whom to evict, without looking at every slot each time.

The coldest slots of a class are found a batch at a time and used up one by one; those that have
become hotter, or are pinned or gone meanwhile, are passed over.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from shared.policy import LfuAgeing
from shared.slots import ClassSlots

# A batch is this share of a class, so that looking at all of its slots is rare.
BATCH_DIVISOR = 16


class VictimChooser:
    """Of one size class. `refresh` brings the heats up to date before a batch is chosen."""

    def __init__(self, slots: ClassSlots, policy: LfuAgeing, refresh: Callable[[], None]) -> None:
        self._slots = slots
        self._policy = policy
        self._refresh = refresh
        self._batch_count = max(1, slots.count // BATCH_DIVISOR)
        self._used_count = 0  # of the last batch
        self._cold: deque[tuple[int, float]] = deque(maxlen=slots.count)

    def choose(self, count: int) -> list[int]:
        """The `count` coldest evictable slots (fewer only where fewer exist), all different."""
        victims: list[int] = []
        refilled = False
        while len(victims) < count:
            if not self._cold:
                if refilled:
                    break
                refilled = True
                self._refill(count, victims)
                continue
            slot, heat = self._cold.popleft()
            self._used_count += 1
            if self._slots.is_evictable(slot) and self._heat(slot) <= heat:
                victims.append(slot)
        return victims

    def prepare(self) -> None:
        """Look for the next batch before it is needed, if much of the last one has been used."""
        if self._used_count > self._batch_count // 2:
            self._cold.clear()
            self._refill(0, [])

    def offer(self, slot: int) -> None:
        """Take an evictable slot first, if the next one of the batch is no colder."""
        heat = self._heat(slot)
        if self._cold and heat <= self._cold[0][1]:
            self._cold.appendleft((slot, heat))

    def _heat(self, slot: int) -> float:
        return float(self._policy.worth(self._slots.key_of(slot)))

    def _refill(self, count: int, chosen: list[int]) -> None:
        self._refresh()
        self._used_count = 0
        slots = self._slots
        candidates = slots.evictable()
        if chosen:
            candidates = candidates[~np.isin(candidates, chosen)]
        if not len(candidates):
            return
        batch_count = min(len(candidates), max(count, self._batch_count))
        keys = slots.key[candidates - slots.first]
        order = self._policy.coldest(keys, batch_count)
        heats = self._policy.worth(keys[order])
        self._cold.extend(zip(candidates[order].tolist(), heats.tolist(), strict=True))
