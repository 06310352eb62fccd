"""A host cache on a bench: plain memory, a clock that is set by hand, reads that end on demand.

`meanwhile`, if set, is called where another process may act in the midst of what the cache does: at
its barriers, and between its two looks into a client's area.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from shared.residency import ClientArea, ResidencyTable, TableShape
from shared.slots import ClassSlots
from streamd.slot_cache.cache import HostCache
from streamd.slot_cache.cache_integrity import check_integrity
from streamd.slot_cache.grants import NO_WISHES, Grant, Step, Wishes

DEADLINE_MS = 2000.0
ROOM = 1000


class BenchArea(ClientArea):
    """As the daemon sees it; the client may move on as soon as `published` has been read."""

    def __init__(self, bench: "CacheBench") -> None:
        super().__init__(bytearray(bench.shape.area_bytes), bench.shape)
        self.initialise()
        self._bench = bench

    @property
    def published(self) -> int:
        published = super().published
        self._bench.others_act()
        return published


class BenchClient:
    """What a client does, by the letter of docs/protocol.md."""

    def __init__(self, bench: "CacheBench", number: int) -> None:
        self.number = number
        self.area = BenchArea(bench)
        self._bench = bench

    def enter(self) -> int:
        return self.area.enter(self._bench.table)

    def leave(self) -> None:
        self.area.leave()

    def look_up(self, layer: int, experts: Sequence[int]) -> list[int]:
        """The slots, -1 for a miss; counts the use."""
        self.area.uses[layer, list(experts)] += np.uint32(1)
        return self._bench.table.host_slots[layer, list(experts)].tolist()

    def fetch(self, layer: int, experts: Iterable[int], section: int | None = None) -> None:
        section = self.area.section if section is None else section
        self._bench.cache.fetch(self.number, section, layer, experts)

    def has_used(self, layer: int, expert: int, count: int) -> None:
        """The router has chosen the expert that often."""
        self.area.uses[layer, expert] += np.uint32(count)


class CacheBench:
    """class_slots: slots of each class; waves: experts a section may need of each.

    layer_class: the class of each layer, -1 for a dense one.
    """

    def __init__(
        self,
        class_slots: Sequence[int] = (8,),
        waves: Sequence[int] = (2,),
        layer_class: Sequence[int] = (0, 0),
        n_experts: int = 16,
    ) -> None:
        self.shape = TableShape(len(layer_class), n_experts)
        self.table = ResidencyTable(bytearray(self.shape.table_bytes), self.shape)
        self.table.initialise()
        self.now_ms = 0.0
        self.barrier_count = 0
        self.meanwhile: Callable[[], None] | None = None
        self.check = check_integrity  # after each event
        self.reads: dict[int, Grant] = {}  # by slot
        classes = [
            ClassSlots(sum(class_slots[:c]), count, layer_class.count(c) * n_experts, waves[c])
            for c, count in enumerate(class_slots)
        ]
        self.cache = HostCache(self.table, layer_class, classes, self._barrier, lambda: self.now_ms)

    def _barrier(self) -> None:
        self.barrier_count += 1
        self.others_act()

    def others_act(self) -> None:
        if self.meanwhile is not None:
            self.meanwhile()

    def attach(self, number: int) -> BenchClient:
        client = BenchClient(self, number)
        self.cache.attach(number, client.area)
        return client

    def step(self, room_count: int = ROOM, wishes: Wishes = NO_WISHES) -> Step:
        """One step of the daemon; its grants are then reads in flight."""
        step = self.cache.step(room_count, wishes)
        for grant in step.grants:
            assert grant.slot not in self.reads, "read into a slot that is being read into"
            self.reads[grant.slot] = grant
        self.check(self.cache)
        return step

    def finish(self, slot: int) -> list[int]:
        """The read into `slot` has succeeded; who is rung."""
        del self.reads[slot]
        rung = self.cache.read_done(slot)
        self.check(self.cache)
        return rung

    def fail(self, slot: int) -> tuple[int, int, list[tuple[int, int]]]:
        del self.reads[slot]
        told = self.cache.read_failed(slot)
        self.check(self.cache)
        return told

    def finish_all(self) -> set[int]:
        return {number for slot in list(self.reads) for number in self.finish(slot)}

    def has_read(self, client: BenchClient, layer: int, experts: Iterable[int]) -> list[int]:
        """A whole section: the experts are missed, read and used; their slots."""
        client.enter()
        client.fetch(layer, experts)
        self.step()
        self.finish_all()
        slots = client.look_up(layer, list(experts))
        client.leave()
        assert min(slots) >= 0
        return slots

    def press(self, client: BenchClient, experts: Iterable[int], layer: int = 1) -> None:
        """Section after section wants another expert: what is cold and free to go has to go."""
        for expert in experts:
            self.now_ms += 10
            client.enter()
            client.look_up(layer, [expert])
            client.fetch(layer, [expert])
            self.step()
            self.finish_all()
        client.leave()

    def resident(self, layer: int) -> set[int]:
        return set(np.flatnonzero(self.table.host_slots[layer] >= 0).tolist())

    def spare_slots(self, class_id: int = 0) -> int:
        return self.cache.classes[class_id].spare_count
