"""Time that was left to the disk: not while a client waits, nor while it works and slabs come."""

import pytest

from infer.daemon.waits import IdleTime, Waits


def idle_after(waits: Waits) -> float:
    """Slabs of 1 s each that could have been read in 10 s, of which `waits` says what was busy."""
    idle = IdleTime(most=100)
    before = Waits(served_s=1.0, served_count=1)
    idle.count(0.0, before)
    waits.served_s, waits.served_count = 1.0, 1
    idle.count(10.0, waits)
    return idle.slab_count


@pytest.mark.parametrize(
    ("waits", "slab_count"),
    [
        (Waits(), 10.0),
        (Waits(waited_s=4.0), 6.0),
        (Waits(overlapped_s=3.0), 7.0),
        (Waits(waited_s=4.0, overlapped_s=3.0), 3.0),
        (Waits(waited_s=12.0), 0.0),
    ],
)
def test_what_is_busy_is_not_left(waits, slab_count):
    assert idle_after(waits) == pytest.approx(slab_count)
