"""The line through what experts took: found, followed, and never absurd."""

import numpy as np
import pytest

from infer.lane.pace import MOST_TIMES, Pace


def test_a_guess_is_a_line_of_its_own():
    pace = Pace(0.1, 0.3)
    assert pace.seconds(0) == 0
    assert pace.seconds(1) == pytest.approx(0.4, rel=0.02)
    assert pace.seconds(4) == pytest.approx(1.3, rel=0.02)


def test_it_finds_start_and_slope_through_noise():
    pace, rng = Pace(5.0, 0.01), np.random.default_rng(3)
    for _ in range(600):
        count = int(rng.integers(1, 7))
        pace.note(count, (0.3 + 0.4 * count) * rng.uniform(0.9, 1.1))
    for count in range(1, 8):
        assert pace.seconds(count) == pytest.approx(0.3 + 0.4 * count, rel=0.08)


def test_it_follows_what_becomes_slower():
    pace = Pace(0.0, 1.0)
    for count in (1, 2, 3) * 100:
        pace.note(count, 3.0 * count)
    assert pace.each_s == pytest.approx(3.0, rel=0.02)


def test_counts_that_are_all_alike_say_nothing_of_a_start():
    pace = Pace(0.5, 0.1)
    for _ in range(2000):
        pace.note(2, 3.0)
    assert pace.seconds(2) == pytest.approx(3.0)
    assert pace.seconds(4) == pytest.approx(6.0, rel=0.02)


def test_more_never_take_less_and_none_take_less_than_nothing():
    pace = Pace(0.1, 0.1)
    for count, seconds in ((1, 5.0), (6, 0.2)) * 200:
        pace.note(count, seconds)
    assert pace.each_s == 0.0
    steep = Pace(0.1, 0.1)
    for count, seconds in ((1, 0.01), (6, 5.0)) * 200:
        steep.note(count, seconds)
    assert steep.seconds(1) > 0


def test_a_stall_counts_for_little():
    pace = Pace(0.0, 1.0)
    for count in (1, 2, 3) * 50:
        pace.note(count, float(count))
    pace.note(2, 1000.0)
    assert pace.seconds(2) < 2.0 * (1 + MOST_TIMES / 32)


def test_what_was_done_before_anybody_looked_pulls_down_only():
    pace = Pace(0.0, 1.0)
    for _ in range(20):
        pace.note_at_most(2, 100.0)
    assert pace.seconds(2) < 1.8
    for _ in range(500):
        pace.note_at_most(2, 0.5)
    assert pace.seconds(2) <= 0.5
