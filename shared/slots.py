"""The state of every slot of one size class, and the lists that make each move O(1).

FREE --take--> READING --publish--> LIVE --retire--> LIMBO --reclaim--> FREE
                  \\--give_back (the read failed)--------------------------^

CLOSED are slots out of use, while the machine is short of memory:

FREE --close----------------------> CLOSED --open--> FREE
LIVE --retire, for good--> LIMBO ------^
"""

from collections import deque
from enum import IntEnum

import numpy as np
import numpy.typing as npt

NO_KEY = -1


class SlotState(IntEnum):
    FREE = 0
    READING = 1
    LIVE = 2
    LIMBO = 3
    CLOSED = 4


class ClassSlots:
    """Slots `first .. first + count - 1`, all of one size.

    wave_experts: the most experts of this class that one section may need.
    expert_count: experts of this class; with a slot for each of them nothing is ever retired.
    """

    def __init__(self, first: int, count: int, expert_count: int, wave_experts: int) -> None:
        self.first = first
        self.count = count
        self.wave_experts = wave_experts
        self.holds_all = count >= expert_count
        # Each twice: of one slot at a time numpy takes several times as long to tell anything.
        self._states = bytearray(count)
        self.state: npt.NDArray[np.int8] = np.frombuffer(self._states, np.int8)
        self.key: npt.NDArray[np.int32] = np.full(count, NO_KEY, np.int32)
        self._keys = self.key.data
        self.pin_count: npt.NDArray[np.int32] = np.zeros(count, np.int32)
        self._pins = self.pin_count.data
        self.free = list(range(first + count - 1, first - 1, -1))
        self.limbo: deque[tuple[int, int]] = deque(maxlen=count)
        self.leaving: deque[tuple[int, int]] = deque(maxlen=count)  # LIMBO, to be CLOSED
        self.closed: list[int] = []
        self.reading_count = 0
        self.pinned_live_count = 0

    def owns(self, slot: int) -> bool:
        return self.first <= slot < self.first + self.count

    @property
    def retirable_count(self) -> int:
        """FREE + LIMBO + what could be retired now."""
        return self.usable_count - self.reading_count - self.pinned_live_count

    @property
    def usable_count(self) -> int:
        """All but the CLOSED and those that are about to be."""
        return self.count - len(self.closed) - len(self.leaving)

    @property
    def spare_count(self) -> int:
        """FREE + LIMBO, but for what is about to be CLOSED."""
        return len(self.free) + len(self.limbo)

    @property
    def used_count(self) -> int:
        return self.usable_count - len(self.free)

    def state_of(self, slot: int) -> SlotState:
        return SlotState(self._states[slot - self.first])

    def key_of(self, slot: int) -> int:
        key: int = self._keys[slot - self.first]
        return key

    def take(self, key: int) -> int:
        slot = self.free.pop()
        self._move(slot, SlotState.FREE, SlotState.READING)
        self._keys[slot - self.first] = key
        self.reading_count += 1
        return slot

    def publish(self, slot: int) -> None:
        self._move(slot, SlotState.READING, SlotState.LIVE)
        self.reading_count -= 1
        if self._pins[slot - self.first]:
            self.pinned_live_count += 1

    def give_back(self, slot: int) -> None:
        assert not self._pins[slot - self.first], "a failed slot is unpinned first"
        self._move(slot, SlotState.READING, SlotState.FREE)
        self.reading_count -= 1
        self._keys[slot - self.first] = NO_KEY
        self.free.append(slot)

    def retire(self, slot: int, stamp: int, for_good: bool = False) -> None:
        assert not self._pins[slot - self.first], "a pinned slot is no victim"
        self._move(slot, SlotState.LIVE, SlotState.LIMBO)
        self._keys[slot - self.first] = NO_KEY
        (self.leaving if for_good else self.limbo).append((stamp, slot))

    def reclaim(self, oldest_epoch: int) -> None:
        """LIMBO -> FREE (or CLOSED) for slots that nobody who entered before their stamps reads."""
        while self.limbo and self.limbo[0][0] <= oldest_epoch:
            _, slot = self.limbo.popleft()
            self._move(slot, SlotState.LIMBO, SlotState.FREE)
            self.free.append(slot)
        while self.leaving and self.leaving[0][0] <= oldest_epoch:
            _, slot = self.leaving.popleft()
            self._move(slot, SlotState.LIMBO, SlotState.CLOSED)
            self.closed.append(slot)

    def close(self) -> None:
        """Take a FREE slot out of use."""
        assert not self.holds_all, "sections of such a class count on a slot for each expert"
        slot = self.free.pop()
        self._move(slot, SlotState.FREE, SlotState.CLOSED)
        self.closed.append(slot)

    def open(self) -> None:
        """Put the slot back into use that was closed last."""
        slot = self.closed.pop()
        self._move(slot, SlotState.CLOSED, SlotState.FREE)
        self.free.append(slot)

    def pin(self, slot: int) -> None:
        index = slot - self.first
        self._pins[index] += 1
        if self._pins[index] == 1 and self._states[index] == SlotState.LIVE:
            self.pinned_live_count += 1

    def unpin(self, slot: int) -> None:
        index = slot - self.first
        assert self._pins[index] > 0, f"slot {slot} unpinned twice"
        self._pins[index] -= 1
        if self._pins[index] == 0 and self._states[index] == SlotState.LIVE:
            self.pinned_live_count -= 1

    def evictable(self) -> npt.NDArray[np.int32]:
        """Slot numbers that are LIVE and unpinned."""
        indices = np.flatnonzero((self.state == SlotState.LIVE) & (self.pin_count == 0))
        return (indices + self.first).astype(np.int32)

    def is_evictable(self, slot: int) -> bool:
        index = slot - self.first
        return self._states[index] == SlotState.LIVE and not self._pins[index]

    def _move(self, slot: int, before: SlotState, after: SlotState) -> None:
        index = slot - self.first
        assert self._states[index] == before, f"slot {slot} is {self.state_of(slot).name}"
        self._states[index] = after

    def check_integrity(self) -> None:
        counts = {state: int((self.state == state).sum()) for state in SlotState}
        assert counts[SlotState.FREE] == len(set(self.free)) == len(self.free)
        limbo = [slot for _, slot in (*self.limbo, *self.leaving)]
        assert counts[SlotState.LIMBO] == len(set(limbo)) == len(limbo)
        assert counts[SlotState.READING] == self.reading_count
        assert counts[SlotState.CLOSED] == len(set(self.closed)) == len(self.closed)
        stamps = [stamp for stamp, _ in self.limbo]
        assert stamps == sorted(stamps), "limbo is ordered by stamp"
        named = (self.state == SlotState.READING) | (self.state == SlotState.LIVE)
        assert bool(np.all((self.key != NO_KEY) == named)), "a slab's key lives as long as the slab"
        assert len(set(self.key[named].tolist())) == int(named.sum()), "one slot an expert"
        pinned_live = (self.state == SlotState.LIVE) & (self.pin_count > 0)
        assert int(pinned_live.sum()) == self.pinned_live_count
        unused = ~named
        assert not bool(np.any(self.pin_count[unused])), "only slabs are pinned"
