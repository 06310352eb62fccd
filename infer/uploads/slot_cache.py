r"""Which experts are in the GPU slots of one client, and whom a new one puts out. Pure policy.

    FREE --claim--> READING --publish--> LIVE --claim, of another--> FREE
                       \--rebuild--------------------------------------^

There is one reader, the client itself, and it says when kernels that read a slot are launched. So a
victim needs no grace period: `readers` tells what must be done on the GPU before its slot is
written.
"""

import numpy as np
import numpy.typing as npt

from shared.arena import ArenaLayout
from shared.experts import ExpertIndex
from shared.policy import LfuAgeing
from shared.residency import NOT_RESIDENT, ClientArea
from shared.scan import USE_PARTS
from shared.slot_plan import class_slots
from shared.slots import NO_KEY, ClassSlots
from shared.victims import VictimChooser

Integers = npt.NDArray[np.integer]
# A victim is nobody's but the client's own to wait for.
_NO_GRACE = 0


class SlotCache:
    """rows: int32 [n_layers, n_experts], written here: the slot of each expert, or -1.

    area: where the client counts what its routers choose. readers: int64 [slots], the number of the
    last section that has read each slot, 0 before the first.
    """

    def __init__(
        self,
        layout: ArenaLayout,
        experts: ExpertIndex,
        rows: npt.NDArray[np.int32],
        area: ClientArea,
    ) -> None:
        self._layout, self._experts = layout, experts
        self.rows = rows
        self.readers = np.zeros(layout.slot_count, np.int64)
        self.held: list[int] = []
        self.eviction_count = 0
        self._layer_class = experts.layer_class.tolist()
        self._n_experts = experts.n_experts
        self._area = area
        self._absorbed = area.counted.copy()
        self.policy = LfuAgeing(rows.size)
        self._make_classes()

    def _make_classes(self) -> None:
        """All slots FREE."""
        # The most that a section may hold: any number that there are slots for.
        waves = self._layout.class_slot_counts
        self.classes: list[ClassSlots] = class_slots(self._layout, waves, self._experts)
        self._choosers = [VictimChooser(c, self.policy, self._absorb) for c in self.classes]

    def _absorb(self) -> None:
        """Take in what has been used since the last time."""
        counted = self._area.counted.copy()
        uses, scanned = (counted - self._absorbed).reshape(2, -1)
        self.policy.absorb(uses + scanned / USE_PARTS)
        self._absorbed = counted

    def slot_count(self, layer: int) -> int:
        """Of the class of a layer's experts."""
        return self.classes[self._layer_class[layer]].count

    def holds_all(self, layer: int) -> bool:
        """Whether there is a slot for every expert of that class."""
        return self.classes[self._layer_class[layer]].holds_all

    def hold(self, layer: int, slots: npt.NDArray[np.int32]) -> None:
        """These are read in the present section: none of them is a victim until `release`."""
        owner = self.classes[self._layer_class[layer]]
        for slot in slots.tolist():
            owner.pin(slot)
            self.held.append(slot)

    def claim(self, layer: int, experts: Integers) -> npt.NDArray[np.int32]:
        """Slots for experts that have none, held from now on: free ones, then the coldest.

        What is there may still be read, by kernels of the sections that `readers` names.
        """
        class_id = self._layer_class[layer]
        owner = self.classes[class_id]
        for victim in self._choosers[class_id].choose(len(experts) - len(owner.free)):
            self.rows[divmod(owner.key_of(victim), self._n_experts)] = NOT_RESIDENT
            owner.retire(victim, _NO_GRACE)
            self.eviction_count += 1
        owner.reclaim(_NO_GRACE)
        assert len(owner.free) >= len(experts), "a section wants more than there are slots"
        keys = layer * self._n_experts + experts.astype(np.int64)
        slots = np.array([owner.take(key) for key in keys.tolist()], np.int32)
        self.hold(layer, slots)
        return slots

    def publish(self, slot: int) -> None:
        """Its slab is there."""
        owner = self._class_of(slot)
        owner.publish(slot)
        self.rows[divmod(owner.key_of(slot), self._n_experts)] = slot

    def release(self, section: int) -> None:
        """The present section, of that number, has launched what reads its slots."""
        self.readers[self.held] = section
        for slot in self.held:
            self._class_of(slot).unpin(slot)
        self.held.clear()

    def rebuild(self, section: int) -> None:
        """As `release`, of a section that was broken off, in the middle of a change perhaps: what
        the table names is there, every other slot is FREE. Nothing is copied to a slot any more."""
        self.readers[self.held] = section
        self.held.clear()
        self._make_classes()
        named = np.flatnonzero(self.rows.reshape(-1) != NOT_RESIDENT)
        keys = dict(zip(self.rows.reshape(-1)[named].tolist(), named.tolist(), strict=True))
        for owner in self.classes:
            others = []
            for _ in range(owner.count):  # ascending, as `take` gives them
                slot = owner.free[-1]
                owner.take(keys.get(slot, NO_KEY))
                if slot in keys:
                    owner.publish(slot)
                else:
                    others.append(slot)
            for slot in reversed(others):
                owner.give_back(slot)

    def last_reader(self, slots: npt.NDArray[np.int32]) -> int:
        """The last section that has read any of some slots; 0 if none has."""
        return int(self.readers[slots].max(initial=0))

    def _class_of(self, slot: int) -> ClassSlots:
        return next(slots for slots in self.classes if slots.owns(slot))
