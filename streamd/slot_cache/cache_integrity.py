"""What must be true of a host cache between any two calls; for tests and for hunting bugs."""

from collections import Counter

import numpy as np

from shared.residency import NOT_RESIDENT
from shared.slots import NO_KEY, ClassSlots, SlotState
from streamd.slot_cache.cache import NO_CLASS, HostCache


def check_integrity(cache: HostCache) -> None:
    """AssertionError where table, slots, reads in flight, pins and requests contradict."""
    for slots in cache.classes:
        slots.check_integrity()
        _check_reserve(cache, slots)
    _check_table(cache)
    _check_reads(cache)
    _check_pins(cache)
    _check_requests(cache)


def _check_reserve(cache: HostCache, slots: ClassSlots) -> None:
    if slots.holds_all:
        assert not slots.limbo, "a class with a slot for each expert never evicts"
    else:
        reserve_count = sum(c.wave_experts(slots) for c in cache.clients.values())
        assert slots.spare_count >= reserve_count, "the reserve is short"
        assert cache.reserve.count(slots) == reserve_count


def _check_table(cache: HostCache) -> None:
    """An expert is in the table just if a LIVE slot of its class has its key."""
    named = cache.plane.reshape(-1)
    live = np.full_like(named, NOT_RESIDENT)
    for slots in cache.classes:
        indices = np.flatnonzero(slots.state == SlotState.LIVE)
        live[slots.key[indices]] = indices + slots.first
    assert np.array_equal(named, live), "table and slots name different experts"
    n_experts = cache.table.shape.n_experts
    for key in np.flatnonzero(named != NOT_RESIDENT).tolist():
        class_id = cache.layer_class[key // n_experts]
        assert class_id != NO_CLASS
        assert cache.classes[class_id].owns(named[key]), "a slot of another size"


def _check_reads(cache: HostCache) -> None:
    """What is being read is known by its key and by its slot."""
    by_slot = {
        int(index) + slots.first: int(slots.key[index])
        for slots in cache.classes
        for index in np.flatnonzero(slots.state == SlotState.READING)
    }
    assert {slot: key for key, slot in cache.reading.items()} == by_slot


def _check_pins(cache: HostCache) -> None:
    """A slot is pinned once for each client that holds it, and a client's pins fit a section."""
    held = Counter(slot for client in cache.clients.values() for slot in client.pins)
    held.update(cache.ahead)
    for slots in cache.classes:
        for index, pin_count in enumerate(slots.pin_count.tolist()):
            assert pin_count == held[index + slots.first], f"pins of slot {index + slots.first}"


def _check_requests(cache: HostCache) -> None:
    """A request is for an expert that exists, and with the pins no more than a section may need."""
    n_experts = cache.table.shape.n_experts
    slot_keys = {
        index + slots.first: key
        for slots in cache.classes
        for index, key in enumerate(slots.key.tolist())
        if key != NO_KEY
    }
    wanting = {client.number for client in cache.clients.values() if client.wanted}
    assert {client.number for client in cache.asking} == wanting
    for client in cache.clients.values():
        needed = client.wanted | {slot_keys[slot] for slot in client.pins}
        classes = [cache.classes[cache.layer_class[key // n_experts]] for key in needed]
        assert all(len(needed) <= client.wave_experts(slots) for slots in classes)
