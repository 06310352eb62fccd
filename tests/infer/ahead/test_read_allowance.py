"""As much is read ahead as leaves the drive a little idle."""

import pytest

from infer.ahead.read_allowance import LEAST_SLABS, TARGET_SHARE, ReadAllowance

MOST = 12
LAYER_US = 3000


class Drive:
    """Reads a slab in slab_us; of each layer's time so much goes to what is demanded."""

    def __init__(self, slab_us, demand_us, wanted=MOST):
        self.slab_us, self.demand_us, self.wanted = slab_us, demand_us, wanted
        self.idle_us = self.now_us = 0
        self.allowance = ReadAllowance(MOST)
        self.read_counts = []

    def layers(self, count):
        for _ in range(count):
            self.allowance.layer_passed((self.idle_us, self.now_us))
            read_count = self.allowance.take(self.wanted)
            busy_us = self.demand_us + read_count * self.slab_us
            self.read_counts.append(read_count)
            self.now_us += max(LAYER_US, busy_us)
            self.idle_us += max(0, LAYER_US - busy_us)


def test_an_idle_drive_reads_all_that_is_wanted():
    drive = Drive(slab_us=100, demand_us=300)
    drive.layers(200)
    assert drive.read_counts[-1] == MOST


@pytest.mark.parametrize("demand_us", [0, 900, 1800])
def test_a_busy_one_reads_what_its_idle_time_allows(demand_us):
    """In the long run the idle share is what was aimed at."""
    drive = Drive(slab_us=700, demand_us=demand_us)
    drive.layers(200)
    before = drive.idle_us, drive.now_us
    drive.layers(400)
    idle_share = (drive.idle_us - before[0]) / (drive.now_us - before[1])
    assert idle_share == pytest.approx(TARGET_SHARE, abs=0.03)


def test_a_drive_that_demands_keep_busy_reads_hardly_anything_ahead():
    drive = Drive(slab_us=700, demand_us=LAYER_US)
    drive.layers(400)
    assert sum(drive.read_counts[-100:]) == pytest.approx(100 * LEAST_SLABS, abs=1)


def test_what_was_not_wanted_is_not_saved_up():
    drive = Drive(slab_us=10, demand_us=0, wanted=0)
    drive.layers(200)
    drive.wanted = 10 * MOST
    drive.layers(1)
    assert drive.read_counts[-1] <= MOST + 1


def test_where_the_daemon_says_nothing_new_it_stays_as_it_is():
    """A client that hits only: the daemon sleeps."""
    allowance = ReadAllowance(MOST)
    for _ in range(50):
        allowance.layer_passed((100, 1000))
    assert allowance.slab_count == 1.0
