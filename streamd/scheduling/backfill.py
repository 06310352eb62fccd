"""What an idle tier is filled with: the hottest experts that it does not hold. Pure policy.

Only into slots that are FREE beyond the reserve: nothing is evicted for it. Heat is what the
clients have used, and what the hot list of an earlier run says.
"""

from collections.abc import Callable
from itertools import islice

import numpy as np

from shared.residency import NOT_RESIDENT
from shared.slots import ClassSlots
from streamd.slot_cache.cache import NO_CLASS, HostCache

# Nothing has been demanded for so long.
QUIET_MS = 20.0
# Slabs on their way at a time: they end within moments once somebody demands something.
MAX_UNDERWAY = 4
# How often all experts are looked through for the hottest.
SEARCH_INTERVAL_MS = 200.0
# After so many that could not be had the drive is left to those who demand something.
MAX_HOPELESS = 16

NO_BACKFILL = {"slabs": 0, "bytes": 0}


class Backfill:
    """Of one tier. A key whose slab could not be had is not tried again."""

    def __init__(
        self, cache: HostCache, slab_bytes: Callable[[int], int], now_ms: Callable[[], float]
    ) -> None:
        self._cache = cache
        self._slab_bytes = slab_bytes
        self._now_ms = now_ms
        self._found: dict[int, None] = {}  # keys, hottest first
        self._searched_at_ms = now_ms() - SEARCH_INTERVAL_MS
        self._underway: dict[int, int] = {}  # slot -> key
        self._hopeless: set[int] = set()
        self.stopped = False
        self.demanded_at_ms = now_ms()
        self.slab_count = 0
        self.filled_bytes = 0

    @property
    def eager(self) -> bool:
        """Whether it has more to bring, and only waits for the tier to be quiet."""
        return bool(self._found) and not self.stopped and len(self._underway) < MAX_UNDERWAY

    def wishes(self, is_at_hand: Callable[[int], bool]) -> tuple[int, ...]:
        """Keys to bring next, hottest first; is_at_hand: of those that can be brought now."""
        now_ms = self._now_ms()
        room_count = MAX_UNDERWAY - len(self._underway)
        is_quiet = now_ms - self.demanded_at_ms >= QUIET_MS
        may_search = now_ms - self._searched_at_ms >= SEARCH_INTERVAL_MS
        if self.stopped or not is_quiet or not (self._found or may_search) or room_count <= 0:
            return ()
        open_classes = {slots for slots in self._cache.classes if self._has_room(slots)}
        if not self._found:
            self._searched_at_ms = now_ms
            self._found = self._hottest(open_classes)
        gone: list[int] = []
        wanted: list[int] = []
        for key in self._found:
            if len(wanted) == room_count:
                break
            is_open = self._cache.class_of_key(key) in open_classes
            fits = is_open and not self._cache.has_slot(key) and is_at_hand(key)
            (wanted if fits else gone).append(key)
        for key in gone:
            del self._found[key]
        return tuple(wanted)

    def given(self, key: int, slot: int) -> None:
        self._underway[slot] = key

    def joined(self, slot: int) -> None:
        """Somebody waits for it: it is a demand from now on."""
        self._underway.pop(slot, None)

    def landed(self, slot: int) -> bool:
        """Whether what has arrived was brought by backfill."""
        key = self._underway.pop(slot, None)
        if key is None:
            return False
        self.slab_count += 1
        self.filled_bytes += self._slab_bytes(key)
        return True

    def failed(self, slot: int) -> None:
        key = self._underway.pop(slot, None)
        if key is not None:
            self._hopeless.add(key)
            self._found.pop(key, None)
            self.stopped |= len(self._hopeless) >= MAX_HOPELESS

    def values(self) -> dict[str, int]:
        return {"slabs": self.slab_count, "bytes": self.filled_bytes}

    def _has_room(self, slots: ClassSlots) -> bool:
        """At once, or as soon as what is on its way has landed."""
        reserve = self._cache.reserve
        held_by_others = self._cache.ahead.difference(self._underway)
        if reserve.room_ahead(slots, held_by_others) <= 0:
            return False
        return reserve.may_give(slots, reserve.share_of_all(slots))

    def _hottest(self, open_classes: set[ClassSlots]) -> dict[int, None]:
        """The hottest keys without a slot, of those that are warm at all and may find one."""
        cache = self._cache
        is_open = [c != NO_CLASS and cache.classes[c] in open_classes for c in cache.layer_class]
        fits = (cache.plane == NOT_RESIDENT) & np.array(is_open)[:, np.newaxis]
        heat = np.where(fits.reshape(-1), cache.heat.policy.heat, 0)
        heat[list(self._hopeless)] = 0
        warm = np.flatnonzero(heat)
        hottest = warm[np.argsort(-heat[warm], kind="stable")]
        return dict.fromkeys(islice(hottest.tolist(), sum(s.spare_count for s in open_classes)))
