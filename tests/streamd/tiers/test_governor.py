"""How much the host tier may hold, by what the machine has left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamd.tiers.governor import CALM_S, GOOD_DIVISOR, LOW_DIVISOR, Governor

INITIAL = 3200
LOW, GOOD = INITIAL // LOW_DIVISOR, INITIAL // GOOD_DIVISOR
FLOOR, FULL = 300, 2000


@pytest.fixture
def governor():
    return Governor(FLOOR, FULL, INITIAL)


def test_with_enough_memory_it_has_all(governor):
    for second in range(100):
        assert governor.look(1000, 1500, second) == FULL


def test_a_machine_that_is_short_gets_what_it_lacks_at_once(governor):
    assert governor.look(LOW, 1500, 0) == FULL, "not yet short"
    assert governor.look(LOW - 1, 1500, 1) == 1500 - (GOOD - LOW + 1)


def test_what_takes_its_time_is_not_asked_for_again(governor):
    first = governor.look(50, 1500, 0)
    assert all(governor.look(50, 1500, second) == first for second in range(1, 10))
    assert governor.look(50, 1400, 10) == first - 100


def test_it_never_goes_below_the_floor(governor):
    assert governor.look(0, 350, 0) == FLOOR


def test_it_grows_back_by_halves_when_it_has_been_calm(governor):
    low = governor.look(0, 1000, 0)
    assert governor.look(GOOD + 400, low, 1) == low
    assert governor.look(GOOD + 400, low, CALM_S) == low, "not yet calm for so long"
    assert governor.look(GOOD + 400, low, 1 + CALM_S) == low + 200
    assert governor.look(GOOD + 400, low, 2 + CALM_S) == low + 200
    assert governor.look(GOOD + 10_000, low, 1 + 2 * CALM_S) == FULL


def test_calm_has_to_last(governor):
    low = governor.look(0, 1000, 0)
    governor.look(GOOD + 400, low, 1)
    governor.look(GOOD, low, CALM_S)
    assert governor.look(GOOD + 400, low, 1 + CALM_S) == low


@given(st.lists(st.tuples(st.integers(0, 2 * INITIAL), st.integers(0, FULL)), max_size=40))
def test_the_limit_stays_within_its_bounds(looks):
    governor = Governor(FLOOR, FULL, INITIAL)
    for number, (available, held) in enumerate(looks):
        assert FLOOR <= governor.look(available, held, 20.0 * number) <= FULL
