"""Taking victims out of a tier's slots: LIVE -> LIMBO -> FREE, by docs/protocol.md's rules."""

from collections.abc import Callable, Mapping, Sequence

from shared.residency import NOT_RESIDENT, ResidencyTable
from shared.slots import ClassSlots
from shared.victims import VictimChooser
from streamd.scheduling.heat import Heat
from streamd.slot_cache.cache_counters import CacheCounters

# A class and one of its slots.
Victim = tuple[ClassSlots, int]


class Eviction:
    """Of all size classes of one tier, HOST_TIER or GPU_TIER."""

    def __init__(
        self,
        table: ResidencyTable,
        tier: str,
        classes: Sequence[ClassSlots],
        heat: Heat,
        barrier: Callable[[], None],
        counters: CacheCounters,
    ) -> None:
        self._table = table
        self._cells = table.cells_of(tier)
        self._barrier = barrier
        self._counters = counters
        self._choosers = {c: VictimChooser(c, heat.policy, heat.refresh) for c in classes}

    def make_spare(self, needed_counts: Mapping[ClassSlots, int]) -> None:
        """Take victims out until each class has so many slots FREE or in LIMBO."""
        victims: list[Victim] = []
        for slots, needed_count in needed_counts.items():
            if needed_count > slots.spare_count:
                victims += self.choose(slots, needed_count - slots.spare_count)
        self.take_out(victims)

    def choose(self, slots: ClassSlots, count: int) -> list[Victim]:
        """The `count` coldest of a class, fewer where there are no more that can go."""
        return [(slots, slot) for slot in self._choosers[slots].choose(count)]

    def take_out(self, victims: Sequence[Victim], for_good: bool = False) -> None:
        """LIVE -> LIMBO, with the grace period begun; `for_good`: to be closed after it."""
        if not victims:
            return
        for slots, slot in victims:
            self._cells[slots.key_of(slot)] = NOT_RESIDENT
        self._barrier()
        self._table.epoch += 1
        for slots, slot in victims:
            slots.retire(slot, self._table.epoch, for_good)
        self._barrier()
        self._counters.evictions += len(victims)

    def offer(self, slots: ClassSlots, slot: int) -> None:
        """A slab that nobody wanted after all: it goes before those that are as cold as it is."""
        self._choosers[slots].offer(slot)

    def prepare(self) -> None:
        """Look for victims in a quiet moment, so that no request has to wait for it."""
        for chooser in self._choosers.values():
            chooser.prepare()
