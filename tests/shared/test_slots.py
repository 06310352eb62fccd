"""A slot's life: which moves there are, what they count, and that no other move is possible."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.residency import NONE_EPOCH
from shared.slots import NO_KEY, ClassSlots, SlotState

FIRST, COUNT = 100, 6


@pytest.fixture
def slots():
    return ClassSlots(FIRST, COUNT, expert_count=50, wave_experts=2)


def live(slots, key):
    slot = slots.take(key)
    slots.publish(slot)
    return slot


def test_all_slots_begin_free(slots):
    assert (slots.spare_count, slots.used_count, slots.retirable_count) == (COUNT, 0, COUNT)
    assert sorted(slots.free) == list(range(FIRST, FIRST + COUNT))
    assert [slots.owns(slot) for slot in (FIRST - 1, FIRST, FIRST + COUNT - 1, FIRST + COUNT)] == [
        False, True, True, False,
    ]  # fmt: skip
    slots.check_integrity()


def test_the_life_of_a_slot(slots):
    slot = slots.take(7)
    assert (slots.state_of(slot), slots.key_of(slot)) == (SlotState.READING, 7)
    assert (slots.spare_count, slots.retirable_count) == (COUNT - 1, COUNT - 1)
    slots.publish(slot)
    assert (slots.state_of(slot), slots.key_of(slot)) == (SlotState.LIVE, 7)
    assert slots.retirable_count == COUNT
    assert slots.is_evictable(slot)
    slots.retire(slot, stamp=3)
    assert (slots.state_of(slot), slots.key_of(slot)) == (SlotState.LIMBO, NO_KEY)
    assert (slots.spare_count, slots.used_count) == (COUNT, 1)
    slots.reclaim(2)
    assert slots.state_of(slot) == SlotState.LIMBO
    slots.reclaim(3)
    assert slots.state_of(slot) == SlotState.FREE
    assert slots.used_count == 0


def test_limbo_ends_in_the_order_of_stamps(slots):
    retired = [live(slots, key) for key in range(3)]
    for stamp, slot in enumerate(retired, 5):
        slots.retire(slot, stamp)
    slots.reclaim(6)
    assert [slot for _, slot in slots.limbo] == [retired[2]]
    slots.reclaim(NONE_EPOCH)
    assert not slots.limbo
    slots.check_integrity()


def test_a_failed_read_gives_its_slot_back(slots):
    slot = slots.take(7)
    slots.pin(slot)
    with pytest.raises(AssertionError, match="unpinned first"):
        slots.give_back(slot)
    slots.unpin(slot)
    slots.give_back(slot)
    assert (slots.state_of(slot), slots.key_of(slot)) == (SlotState.FREE, NO_KEY)
    slots.check_integrity()


def test_pins_are_counted_and_hold(slots):
    slot, other = slots.take(7), live(slots, 8)
    slots.pin(slot)
    slots.pin(slot)
    assert slots.retirable_count == COUNT - 1, "it is being read, pinned or not"
    slots.publish(slot)
    assert slots.retirable_count == COUNT - 1
    assert slots.evictable().tolist() == [other]
    slots.unpin(slot)
    assert not slots.is_evictable(slot)
    with pytest.raises(AssertionError, match="no victim"):
        slots.retire(slot, 1)
    slots.unpin(slot)
    assert slots.is_evictable(slot)
    assert slots.retirable_count == COUNT
    with pytest.raises(AssertionError, match="unpinned twice"):
        slots.unpin(slot)


@pytest.mark.parametrize("move", ["publish", "give_back"])
def test_what_is_not_being_read_cannot_end_its_read(slots, move):
    for slot in (slots.free[-1], live(slots, 1)):
        with pytest.raises(AssertionError, match=f"slot {slot} is"):
            getattr(slots, move)(slot)


def test_only_what_is_live_can_be_retired(slots):
    reading, retired = slots.take(1), live(slots, 2)
    slots.retire(retired, 1)
    for slot in (slots.free[-1], reading, retired):
        with pytest.raises(AssertionError, match=f"slot {slot} is"):
            slots.retire(slot, 2)


def test_a_class_with_a_slot_for_each_expert_holds_all():
    assert ClassSlots(0, 50, 50, 2).holds_all
    assert not ClassSlots(0, 49, 50, 2).holds_all


@given(st.lists(st.tuples(st.sampled_from("trgvpuc"), st.integers(0, 100)), max_size=60))
def test_any_legal_moves_leave_it_consistent(moves):
    slots = ClassSlots(FIRST, COUNT, expert_count=50, wave_experts=2)
    pinned = []
    stamp = 0
    for move, pick in moves:
        by_state = {
            state: [s for s in range(FIRST, FIRST + COUNT) if slots.state_of(s) == state]
            for state in SlotState
        }
        named = by_state[SlotState.READING] + by_state[SlotState.LIVE]
        reading = by_state[SlotState.READING]
        if move == "t" and slots.free and pick not in {slots.key_of(s) for s in named}:
            slots.take(pick)
        elif move == "r" and reading:
            slots.publish(reading[pick % len(reading)])
        elif move == "g" and (failed := [s for s in reading if s not in pinned]):
            slots.give_back(failed[pick % len(failed)])
        elif move == "v" and len(victims := slots.evictable()):
            stamp += 1
            slots.retire(int(victims[pick % len(victims)]), stamp)
        elif move == "p" and named:
            pinned.append(named[pick % len(named)])
            slots.pin(pinned[-1])
        elif move == "u" and pinned:
            slots.unpin(pinned.pop(pick % len(pinned)))
        elif move == "c":
            slots.reclaim(pick)
        slots.check_integrity()
        assert slots.spare_count + np.count_nonzero(slots.key != NO_KEY) == COUNT
        assert slots.retirable_count == slots.spare_count + len(slots.evictable())
