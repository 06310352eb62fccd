"""Hints without a cache: whose turn it is, and that each ends in exactly one way."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shared.residency import ClientArea, ResidencyTable, TableShape
from streamd.scheduling.prefetch import (
    FAILED_PAUSE_MS,
    HINT_AGE_MS,
    MAX_FAILED,
    MAX_WAITING,
    SPARE_SLOTS,
    Prefetch,
)

SHAPE = TableShape(4, 8)
SLAB_BYTES = 1000
KEYS = st.integers(0, SHAPE.cell_count - 1)


def an_area():
    area = ClientArea(bytearray(SHAPE.area_bytes), SHAPE)
    area.initialise()
    return area


def a_table():
    table = ResidencyTable(bytearray(SHAPE.table_bytes), SHAPE)
    table.initialise()
    return table


@pytest.fixture
def prefetch():
    return Prefetch(lambda key: SLAB_BYTES, lambda key: 0)


def everything(key):
    return True


def test_the_section_that_comes_first_goes_first(prefetch):
    area = an_area()
    prefetch.hint(0, area, 3, [9, 8], 0.0)
    prefetch.hint(0, area, 1, [5, 4], 0.0)
    assert prefetch.wishes(3, everything) == (5, 4, 9)
    assert prefetch.wishes(9, lambda key: key != 4) == (5, 9, 8)


def test_clients_take_turns(prefetch):
    for number, keys in ((0, [1, 2, 3]), (1, [11]), (2, [21, 22])):
        prefetch.hint(number, an_area(), 1, keys, 0.0)
    assert prefetch.wishes(9, everything) == (1, 11, 21, 2, 22, 3)


def test_one_client_cannot_fill_the_list(prefetch):
    many = Prefetch(lambda key: SLAB_BYTES, lambda key: 0)
    many.hint(0, an_area(), 1, range(MAX_WAITING + 7), 0.0)
    many.hint(1, an_area(), 1, [5000], 0.0)
    assert many.counters.refused == 7
    assert 5000 in many.wishes(4, everything)


def test_an_expert_two_clients_may_need_lives_until_both_are_past(prefetch):
    first, second, table = an_area(), an_area(), a_table()
    for number, area in enumerate((first, second)):
        area.enter(table)
        prefetch.hint(number, area, 2, [7], 0.0)
    assert prefetch.counters.hinted == 1
    for area in (first, second):
        prefetch.passed(1.0)
        assert prefetch.waiting
        area.enter(table)
        area.enter(table)
    prefetch.passed(1.0)
    assert not prefetch.waiting
    assert prefetch.counters.expired == 1


def test_a_hint_given_again_lives_on(prefetch):
    area = an_area()
    prefetch.hint(0, area, 2, [7], 0.0)
    prefetch.given(7, slot=3)
    prefetch.landed(3)
    prefetch.hint(0, area, 5, [7], HINT_AGE_MS - 1)
    assert prefetch.passed(HINT_AGE_MS + 1) == []
    assert [hinted.key for hinted in prefetch.passed(2 * HINT_AGE_MS)] == [7]


def test_slots_are_kept_spare_while_hints_come(prefetch):
    assert prefetch.spare_count(0.0) == 0
    prefetch.hint(0, an_area(), 1, [1], 10.0)
    assert prefetch.spare_count(11.0) == SPARE_SLOTS
    assert prefetch.spare_count(11.0 + HINT_AGE_MS) == 0


def test_what_could_not_be_brought_is_left_alone_for_a_while(prefetch):
    def fail(key, now_ms):
        prefetch.hint(0, an_area(), 1, [key], now_ms)
        prefetch.given(key, slot=key)
        prefetch.failed(key, now_ms)

    fail(5, 0.0)
    prefetch.hint(0, an_area(), 1, [5, 6], FAILED_PAUSE_MS - 1)
    assert prefetch.wishes(9, everything) == (6,)
    assert (prefetch.counters.refused, prefetch.counters.failed) == (1, 1)
    prefetch.hint(0, an_area(), 1, [5], FAILED_PAUSE_MS)
    assert set(prefetch.wishes(9, everything)) == {5, 6}
    for key in range(100, 101 + MAX_FAILED):
        fail(key, FAILED_PAUSE_MS)
    prefetch.hint(0, an_area(), 1, [100, 101], FAILED_PAUSE_MS)
    assert set(prefetch.wishes(9, everything)) == {5, 6, 100}, "the oldest is forgotten"


def test_what_has_been_used_is_held_no_longer():
    """Although the section it was hinted for, the last one that may read it, is yet to come."""
    uses, table, area = [0] * SHAPE.cell_count, a_table(), an_area()
    prefetch = Prefetch(lambda key: SLAB_BYTES, uses.__getitem__)
    prefetch.hint(0, area, 9, [5, 6, 7], 0.0)
    for slot, key in enumerate(prefetch.wishes(3, everything)):
        prefetch.given(key, slot)
    prefetch.landed(0)
    prefetch.landed(1)
    assert prefetch.passed(0.0) == []
    area.enter(table)
    uses[5] += 1
    uses[7] += 1  # by somebody else: it is still on its way here
    (used,) = prefetch.passed(0.0)
    assert (used.key, used.slot) == (5, 0)
    assert prefetch.judge(0)
    assert prefetch.passed(0.0) == []
    assert 0 not in prefetch
    assert {1, 2} <= {slot for slot in range(3) if slot in prefetch}
    assert (prefetch.counters.useful, prefetch.counters.wasted) == (1, 0)


class PrefetchMachine(RuleBasedStateMachine):
    """Anything may happen at any time; the books always balance."""

    def __init__(self):
        super().__init__()
        self.table = a_table()
        self.areas = [an_area() for _ in range(3)]
        self.uses = [0] * SHAPE.cell_count
        self.prefetch = Prefetch(lambda key: SLAB_BYTES, self.uses.__getitem__)
        self.underway, self.there, self.now_ms = set(), set(), 0.0
        self.slots = iter(range(10**6))

    @rule(number=st.integers(0, 2), ahead=st.integers(-1, 3), keys=st.lists(KEYS, max_size=5))
    def hint(self, number, ahead, keys):
        area = self.areas[number]
        self.prefetch.hint(number, area, area.section + ahead, keys, self.now_ms)

    @rule(number=st.integers(0, 2), key=KEYS)
    def client_moves(self, number, key):
        self.areas[number].enter(self.table)
        self.uses[key] += 1

    @rule(count=st.integers(1, 4))
    def give(self, count):
        for key in self.prefetch.wishes(count, everything):
            slot = next(self.slots)
            self.prefetch.given(key, slot)
            self.underway.add(slot)

    @rule(key=KEYS)
    def demand(self, key):
        self.prefetch.demanded(key)

    @rule(pick=st.integers(0, 9), how=st.sampled_from(["landed", "failed", "joined"]))
    def end(self, pick, how):
        if self.underway:
            slot = sorted(self.underway)[pick % len(self.underway)]
            match how:
                case "landed":
                    self.prefetch.landed(slot)
                case "failed":
                    self.prefetch.failed(slot, self.now_ms)
                case "joined":
                    self.prefetch.joined(slot)
            self.underway.remove(slot)
            if how == "landed":
                self.there.add(slot)

    @rule(number=st.integers(0, 2))
    def client_goes(self, number):
        self.prefetch.forget(number)

    @rule(elapsed_ms=st.sampled_from([0.0, 1.0, HINT_AGE_MS]), withdraw=st.booleans())
    def look(self, elapsed_ms, withdraw):
        self.now_ms += elapsed_ms
        for hinted in self.prefetch.passed(self.now_ms):
            assert hinted.is_there == (hinted.slot in self.there)
            if hinted.is_there:
                used = self.uses[hinted.key] > hinted.uses
                assert self.prefetch.judge(hinted.slot) == used
                self.there.remove(hinted.slot)
            elif withdraw:
                self.prefetch.withdrawn(hinted.slot)
                self.underway.remove(hinted.slot)

    @invariant()
    def books_balance(self):
        counters = self.prefetch.counters
        verdicts = counters.useful + counters.late + counters.wasted + counters.failed
        open_count = len(self.underway) + len(self.there)
        assert counters.issued == verdicts + counters.withdrawn + open_count
        waiting_count = len(self.prefetch.wishes(10**6, everything))
        assert counters.hinted == (
            counters.expired + counters.demanded + counters.issued + waiting_count
        )
        assert counters.issued_bytes == SLAB_BYTES * (counters.issued - counters.withdrawn)
        assert self.prefetch.there() == sorted(self.there)
        assert self.prefetch.pending == bool(waiting_count or open_count)

    def teardown(self):
        for slot in list(self.underway):
            self.prefetch.landed(slot)
            self.there.add(slot)
        self.underway.clear()
        self.look(2 * HINT_AGE_MS, False)
        assert not self.prefetch.pending


TestPrefetchMachine = PrefetchMachine.TestCase
TestPrefetchMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 31)), max_size=40))
def test_wishes_are_the_waiting_each_once(hints):
    prefetch = Prefetch(lambda key: SLAB_BYTES, lambda key: 0)
    areas = [an_area() for _ in range(6)]
    for number, key in hints:
        prefetch.hint(number, areas[number], 1, [key], 0.0)
    assert sorted(prefetch.wishes(100, everything)) == sorted({key for _, key in hints})
