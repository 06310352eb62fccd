"""Time by part, on a clock that a test sets."""

import pytest

from infer.profiling.parts_clock import PartsClock


class Hands:
    """A clock that goes on when it is told to."""

    def __init__(self):
        self.now_s = 0.0

    def spend(self, seconds):
        self.now_s += seconds
        return seconds

    def __call__(self):
        return self.now_s


@pytest.fixture
def hands():
    return Hands()


@pytest.fixture
def clock(hands):
    return PartsClock("rest", sealed=frozenset({"sealed"}), clock_s=hands)


def test_what_no_part_claims_is_the_rest(clock, hands):
    hands.spend(1)
    clock.timed("a", hands.spend)(2)
    hands.spend(4)
    assert clock.read() == {"rest": 5, "a": 2}


def test_a_part_inside_another_has_its_own_time_and_the_outer_one_the_rest(clock, hands):
    inner = clock.timed("inner", hands.spend)

    def outer():
        hands.spend(1)
        inner(2)
        hands.spend(4)

    clock.timed("outer", outer)()
    assert clock.read() == {"outer": 5, "inner": 2, "rest": 0}


def test_a_sealed_part_keeps_what_runs_inside(clock, hands):
    clock.timed("sealed", clock.timed("inner", hands.spend))(3)
    assert clock.read() == {"sealed": 3, "rest": 0}


def test_the_arguments_may_choose_the_part(clock, hands):
    timed = clock.timed(lambda seconds: "long" if seconds > 1 else "short", hands.spend)
    assert timed(1) + timed(2) == 3
    assert clock.read() == {"long": 2, "short": 1, "rest": 0}


def test_an_error_ends_its_part(clock, hands):
    def fails():
        hands.spend(1)
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - the one above
        clock.timed("a", fails)()
    hands.spend(2)
    assert clock.read() == {"rest": 2, "a": 1}


def test_queued_work_counts_where_it_was_asked_for(hands):
    clock = PartsClock("rest", settle=lambda: hands.spend(3), clock_s=hands)
    clock.timed("a", hands.spend)(1)
    assert clock.read() == {"a": 4, "rest": 0}


def test_restart_forgets(clock, hands):
    clock.timed("a", hands.spend)(1)
    clock.restart()
    hands.spend(2)
    assert clock.read() == {"rest": 2}
