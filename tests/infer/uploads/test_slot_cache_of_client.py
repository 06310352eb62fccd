"""The policy of a client's own slots, without anything behind it."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.uploads.slot_cache import SlotCache
from infer.uploads.slot_cache_integrity import check_integrity
from shared.arena import ArenaLayout
from shared.experts import SizeClass
from shared.residency import NOT_RESIDENT, ClientArea, TableShape

# Layers 0 and 2 have large experts, 1 has small ones.
N_LAYERS, N_EXPERTS, SLOT_COUNTS = 3, 8, (6, 4)
SHAPE = TableShape(N_LAYERS, N_EXPERTS)


def make_cache():
    classes = (
        SizeClass(0, (512, 512, 512), (0, 2), 16),
        SizeClass(1, (256, 256, 256), (1,), 8),
    )
    experts = SimpleNamespace(
        classes=classes, layer_class=np.array([0, 1, 0], np.int32), n_experts=N_EXPERTS
    )
    layout = ArenaLayout(tuple(c.part_bytes for c in classes), SLOT_COUNTS, 256)
    rows = np.full((N_LAYERS, N_EXPERTS), NOT_RESIDENT, np.int32)
    return SlotCache(layout, experts, rows, ClientArea(bytearray(SHAPE.area_bytes), SHAPE))


def bring(cache, layer, experts, section=1):
    """A section that finds nothing and publishes it all."""
    slots = cache.claim(layer, np.array(experts))
    for slot in slots.tolist():
        cache.publish(slot)
    cache.release(section)
    return slots


def here(cache, layer):
    return np.flatnonzero(cache.rows[layer] != NOT_RESIDENT).tolist()


def test_free_slots_come_first_and_then_the_coldest():
    cache = make_cache()
    bring(cache, 1, [0, 1, 2, 3])
    cache._area.uses[1, [0, 1, 3]] = 5, 9, 7
    bring(cache, 1, [4])
    assert here(cache, 1) == [0, 1, 3, 4]
    assert cache.eviction_count == 1
    check_integrity(cache)


def test_what_a_section_holds_is_no_victim():
    cache = make_cache()
    slots = bring(cache, 1, [0, 1, 2, 3])
    cache._area.uses[1, [2, 3]] = 5
    cache.hold(1, slots[:2])  # the coldest
    cache.claim(1, np.array([6, 7]))
    assert here(cache, 1) == [0, 1]
    check_integrity(cache)


def test_more_than_there_are_slots_is_our_own_mistake():
    cache = make_cache()
    cache.hold(1, bring(cache, 1, [0, 1, 2, 3])[:1])
    with pytest.raises(AssertionError, match="more than there are slots"):
        cache.claim(1, np.array([4, 5, 6, 7]))


def test_a_slot_knows_who_read_it_last():
    cache = make_cache()
    slots = bring(cache, 0, [0, 1], section=3)
    assert cache.last_reader(slots) == 3
    cache.hold(0, slots[:1])
    cache.release(8)
    assert [cache.last_reader(slots[at : at + 1]) for at in (0, 1)] == [8, 3]
    others = cache.claim(0, np.array([4]))
    assert cache.last_reader(others) == 0


def test_what_does_not_come_is_forgotten_but_not_who_may_read_there():
    cache = make_cache()
    bring(cache, 0, [7])
    cache.claim(2, np.array([1, 2]))
    cache.rebuild(5)
    check_integrity(cache)
    assert (here(cache, 0), here(cache, 2)) == ([7], [])
    again = cache.claim(2, np.arange(5))
    assert here(cache, 0) == [7]
    assert cache.last_reader(again) == 5


SECTION = st.tuples(
    st.sampled_from(range(N_LAYERS)),
    st.sets(st.integers(0, N_EXPERTS - 1), min_size=1, max_size=4),
    st.booleans(),
)


@given(st.lists(SECTION, max_size=40))
def test_random_sections(sections):
    """Whatever is asked for and fails: the table is sound, and what was just brought is there."""
    cache = make_cache()
    for number, (layer, chosen, comes) in enumerate(sections, 1):
        experts = np.array(sorted(chosen))
        cache._area.uses[layer, experts] += np.uint32(1)
        slots = cache.rows[layer, experts]
        cache.hold(layer, slots[slots >= 0])
        missing = experts[slots < 0]
        claimed = cache.claim(layer, missing)
        check_integrity(cache)
        if comes:
            for slot in claimed.tolist():
                cache.publish(slot)
            cache.release(number)
        else:
            cache.rebuild(number)
        check_integrity(cache)
        assert set(here(cache, layer)) >= (chosen if comes else set(experts[slots >= 0].tolist()))
