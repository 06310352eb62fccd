"""The rate between pauses, of ends that are known exactly."""

import pytest

from streamd.readers.rate_window import RateWindow

SIZE = 1_000_000


def _rates(ends_s: list[float], needed_bytes: int) -> list[float]:
    window = RateWindow()
    return [rate for at_s in ends_s if (rate := window.ended(SIZE, at_s, needed_bytes)) is not None]


def test_evenly_spaced_ends_fill_one_window_after_the_other():
    rates = _rates([number * 1e-3 for number in range(101)], 10 * SIZE)
    assert rates == pytest.approx([1e9] * 9)


@pytest.mark.parametrize("needed_count", [8, 9, 13, 16])
def test_bunches_are_counted_whole(needed_count):
    """Eight reads every 8 ms: only the very first window may begin within a bunch."""
    bunches = [at * 8e-3 + number * 1e-5 for at in range(40) for number in range(8)]
    _, *others = _rates(bunches, needed_count * SIZE)
    assert len(others) > 10
    assert others == pytest.approx([1e9] * len(others), rel=1e-3)


def test_a_window_lasts_as_long_as_it_should():
    window = RateWindow()
    ended_s = [at * 1e-3 for at in range(101) if window.ended(SIZE, at * 1e-3, SIZE, 0.0195)]
    assert ended_s == pytest.approx([0.021, 0.041, 0.061, 0.081])


def test_a_window_ends_though_the_disk_gets_faster_and_faster():
    now_s, gap_s, ends_s = 0.0, 1e-3, []
    for _ in range(200):
        ends_s.append(now_s)
        now_s, gap_s = now_s + gap_s, gap_s * 0.99
    assert len(_rates(ends_s, 10 * SIZE)) > 10


def test_ends_at_the_same_moment_tell_nothing():
    assert _rates([1.0] * 100, SIZE) == []


def test_what_lies_before_a_reset_is_forgotten():
    window = RateWindow()
    for at_s in (0.0, 1.0, 2.0):
        assert window.ended(SIZE, at_s, 10 * SIZE) is None
    window.reset()
    rates = [window.ended(SIZE, 10 + number * 1e-3, 4 * SIZE) for number in range(6)]
    assert rates == [None] * 5 + [pytest.approx(1e9)]
