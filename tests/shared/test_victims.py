"""Who is evicted: the coldest, also when heats change between two batches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.policy import LfuAgeing
from shared.slots import ClassSlots
from shared.victims import BATCH_DIVISOR, VictimChooser

FIRST = 10


class Bench:
    """`count` LIVE slots that hold experts 0, 1, 2, ..., as hot as `heats` says."""

    def __init__(self, heats):
        self.policy = LfuAgeing(2 * len(heats) + 1)
        self.policy.heat[: len(heats)] = heats
        self.slots = ClassSlots(FIRST, len(heats) + 1, 10**6, 1)
        self.slot_of = [self.slots.take(key) for key in range(len(heats))]
        for slot in self.slot_of:
            self.slots.publish(slot)
        self.refresh_count = 0
        self.chooser = VictimChooser(self.slots, self.policy, self._refresh)

    def _refresh(self):
        self.refresh_count += 1

    def evict(self, count):
        """The experts that have to go."""
        victims = self.chooser.choose(count)
        keys = [self.slots.key_of(slot) for slot in victims]
        for slot in victims:
            self.slots.retire(slot, 1)
        return keys


def test_the_coldest_go_first():
    bench = Bench([5, 1, 4, 0, 3])
    assert bench.evict(2) == [3, 1]
    assert bench.evict(2) == [4, 2]
    assert bench.evict(2) == [0]
    assert bench.evict(2) == []


@pytest.mark.parametrize("count", [0, -3])
def test_nobody_has_to_go(count):
    bench = Bench([1, 2])
    assert bench.evict(count) == []
    assert bench.refresh_count == 0


def test_pinned_and_reading_slots_stay():
    bench = Bench([1, 2, 3])
    bench.slots.pin(bench.slot_of[0])
    bench.slots.take(9)
    assert bench.evict(3) == [1, 2]


def test_a_batch_is_used_up_before_the_heats_are_looked_at_again():
    bench = Bench(range(4 * BATCH_DIVISOR - 1))
    for expert in range(8):
        assert bench.evict(1) == [expert]
    assert bench.refresh_count == 2, "batches of four"


def test_what_has_become_hot_or_pinned_since_is_passed_over():
    bench = Bench(range(4 * BATCH_DIVISOR - 1))
    assert bench.evict(1) == [0]
    bench.policy.heat[1] = 1000
    bench.slots.pin(bench.slot_of[2])
    assert bench.evict(1) == [3]
    assert bench.evict(1) == [4]


def test_a_slot_with_a_new_hot_expert_is_passed_over():
    bench = Bench(range(4 * BATCH_DIVISOR - 1))
    assert bench.evict(1) == [0]
    bench.slots.retire(bench.slot_of[1], 1)
    bench.slots.reclaim(1)
    bench.policy.heat[100] = 1000
    while bench.slots.free:
        slot = bench.slots.take(100)
        if slot == bench.slot_of[1]:
            bench.slots.publish(slot)
            break
        bench.slots.key[slot - FIRST] = 101  # left in READING
    assert bench.evict(2) == [2, 3]


def test_enough_are_found_though_the_batch_is_stale():
    bench = Bench(range(4 * BATCH_DIVISOR - 1))
    assert bench.evict(1) == [0]
    bench.policy.heat[1:4] = 1000
    assert bench.evict(5) == [4, 5, 6, 7, 8]


def test_who_is_left_of_one_batch_is_not_chosen_again_from_the_next():
    bench = Bench(range(4 * BATCH_DIVISOR - 1))
    assert bench.evict(1) == [0]
    assert bench.evict(6) == [1, 2, 3, 4, 5, 6]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=40),
    st.lists(st.integers(0, 12), max_size=5),
)
def test_in_one_go_they_are_what_sorting_gives(heats, counts):
    bench = Bench(heats)
    left = set(range(len(heats)))
    for count in counts:
        gone = bench.evict(count)
        assert len(gone) == len(set(gone)) == min(count, len(left))
        left -= set(gone)
        coldest_left = min((heats[expert] for expert in left), default=10)
        assert all(heats[expert] <= coldest_left for expert in gone)
    assert np.count_nonzero(bench.slots.evictable()) == len(left)


def test_what_is_offered_goes_first_if_it_is_as_cold():
    bench = Bench([3, 1, 4, 2, 5])
    assert bench.evict(1) == [1]
    bench.policy.heat[4] = 1.5
    bench.chooser.offer(bench.slot_of[4])
    bench.chooser.offer(bench.slot_of[2])  # hotter than what comes next: left where it is
    assert bench.evict(4) == [4, 3, 0, 2]


def test_an_offer_to_nobody_is_forgotten():
    bench = Bench([3, 1])
    bench.chooser.offer(bench.slot_of[0])
    assert bench.evict(2) == [1, 0]


def test_victims_are_looked_for_before_they_are_needed():
    bench = Bench(range(4 * BATCH_DIVISOR))
    assert bench.evict(1) == [0]
    bench.chooser.prepare()
    assert bench.refresh_count == 1, "most of the batch is left"
    bench.evict(2)
    bench.policy.heat[50] = 0
    bench.chooser.prepare()
    assert bench.refresh_count == 2
    assert bench.evict(3) == [50, 3, 4]
    assert bench.refresh_count == 2


def test_it_is_not_looked_again_and_again_where_few_can_go():
    bench = Bench(range(4 * BATCH_DIVISOR))
    bench.evict(4 * BATCH_DIVISOR)
    before = bench.refresh_count
    for _ in range(3):
        bench.chooser.prepare()
    assert bench.refresh_count == before + 1


@pytest.mark.parametrize("expects", [False, True])
def test_a_prompt_that_comes_round_finds_what_there_is_room_for(expects):
    """Layers are read one after the other, again and again; slots are there for half of them."""
    n_layers, n_experts, round_count = 8, 32, 6
    policy = LfuAgeing(n_layers * n_experts)
    slots = ClassSlots(0, n_layers * n_experts // 2, 1, 1)
    chooser = VictimChooser(slots, policy, lambda: None)
    slot_of, hit_count = {}, 0
    for number in range(round_count):
        for layer in range(n_layers):
            policy.expect([layer] if expects else [], n_layers)
            keys = np.arange(n_experts) + layer * n_experts
            for key in keys.tolist():
                if key in slot_of:
                    hit_count += number == round_count - 1
                    continue
                if not slots.free:
                    (victim,) = chooser.choose(1)
                    del slot_of[slots.key_of(victim)]
                    slots.retire(victim, 1)
                    slots.reclaim(2)
                slot_of[key] = slots.take(key)
                slots.publish(slot_of[key])
            policy.absorb(np.bincount(keys, minlength=n_layers * n_experts).astype(np.uint32))
    assert (hit_count / (n_layers * n_experts) >= 0.45) == expects
