"""Slots of each size class from a budget in bytes: pure arithmetic, for every tier."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.arena import ArenaLayout, slot_bytes
from shared.experts import ExpertIndex
from shared.slots import ClassSlots

# The floor lets two clients decode: each one's top-k in use, and as much again in reserve.
FLOOR_CLIENTS = 2
# A section may need this share of a class, at least the top-k. What every client keeps in reserve
# is as much, so a larger share would cost hits, a smaller one prefill waves.
WAVE_DIVISOR = 64


@dataclass(frozen=True)
class Demand:
    """What a tier's slots take, of each size class: bytes of a slot, experts, slots at the least.

    floor_bytes, full_bytes: slots at the least, and one for every expert.
    """

    align: int
    slot_sizes: tuple[int, ...]
    expert_counts: tuple[int, ...]
    floor_counts: tuple[int, ...]

    @classmethod
    def of(cls, experts: ExpertIndex, align: int, lane_count: int = 0) -> "Demand":
        """lane_count: experts that the daemon itself uses at a time, besides its clients."""
        floor_count = 2 * (experts.top_k * FLOOR_CLIENTS + lane_count)
        counts = tuple(c.expert_count for c in experts.classes)
        return cls(
            align,
            tuple(slot_bytes(c.part_bytes, align) for c in experts.classes),
            counts,
            tuple(min(count, floor_count) for count in counts),
        )

    @property
    def floor_bytes(self) -> int:
        return self.bytes_of(self.floor_counts)

    @property
    def full_bytes(self) -> int:
        return self.bytes_of(self.expert_counts)

    def bytes_of(self, counts: Sequence[int]) -> int:
        return sum(n * size for n, size in zip(counts, self.slot_sizes, strict=True))


def place(
    experts: ExpertIndex, demand: Demand, budget_bytes: int
) -> tuple[ArenaLayout, tuple[int, ...]]:
    """Slots of each class for a budget that is no less than the floor, and each class's wave."""
    slot_counts = _split(budget_bytes, demand)
    waves = tuple(
        experts.n_experts if slots == count else max(experts.top_k, slots // WAVE_DIVISOR)
        for slots, count in zip(slot_counts, demand.expert_counts, strict=True)
    )
    parts = tuple(c.part_bytes for c in experts.classes)
    return ArenaLayout(parts, tuple(slot_counts), demand.align), waves


def _split(budget_bytes: int, demand: Demand) -> list[int]:
    """Slots for each class: the same share of its experts, but never less than its floor.

    Every layer chooses its top-k for every token, so demand goes by layers, and the experts of all
    layers are as likely to be wanted; a class raised to its floor takes from the others.
    """
    sizes, counts, floors = demand.slot_sizes, demand.expert_counts, demand.floor_counts
    shares = [0] * len(sizes)
    open_classes = set(range(len(sizes)))
    while True:  # fewer are open each time, and none is raised where none is open
        left_bytes = budget_bytes - sum(
            shares[c] * sizes[c] for c in range(len(sizes)) if c not in open_classes
        )
        wanted_bytes = sum(counts[c] * sizes[c] for c in open_classes)
        for c in open_classes:  # whole numbers: a float's rounding would lose a slot
            shares[c] = min(counts[c], counts[c] * left_bytes // wanted_bytes)
        raised = {c for c in open_classes if shares[c] < floors[c]}
        for c in raised:
            shares[c] = floors[c]
        open_classes -= raised
        if not raised:
            break
    assert demand.bytes_of(shares) <= budget_bytes
    return shares


def class_slots(
    layout: ArenaLayout, wave_experts: Sequence[int], experts: ExpertIndex
) -> list[ClassSlots]:
    """The slots of a layout, all FREE."""
    return [
        ClassSlots(layout.first_slot(c.class_id), count, c.expert_count, wave)
        for c, count, wave in zip(
            experts.classes, layout.class_slot_counts, wave_experts, strict=True
        )
    ]
