"""What must be true of a client's slots between any two calls; for tests and for hunting bugs."""

from collections import Counter

import numpy as np

from infer.uploads.slot_cache import SlotCache
from shared.residency import NOT_RESIDENT
from shared.slots import SlotState


def check_integrity(cache: SlotCache) -> None:
    """AssertionError where table, slots and what is held contradict each other."""
    named = cache.rows.reshape(-1)
    live = np.full_like(named, NOT_RESIDENT)
    held = Counter(cache.held)
    for slots in cache.classes:
        slots.check_integrity()
        assert not slots.limbo, "a victim's slot is free at once"
        assert not slots.closed
        indices = np.flatnonzero(slots.state == SlotState.LIVE)
        live[slots.key[indices]] = indices + slots.first
        for index, pin_count in enumerate(slots.pin_count.tolist()):
            assert pin_count == held[index + slots.first], "a slot is held while its section lasts"
    assert np.array_equal(named, live), "table and slots name different experts"
