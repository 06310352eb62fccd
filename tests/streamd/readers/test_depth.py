"""The depth controller on simulated drives, noisy ones, against the best limit for each."""

import math
import random
import statistics
from collections import deque
from dataclasses import dataclass
from functools import cache
from itertools import cycle

import pytest

from streamd.readers.depth import (
    MAX_LIMIT_BYTES,
    MIN_LIMIT_BYTES,
    SLOW_SETTLE_S,
    SLOW_WINDOW_S,
    START_LIMIT_BYTES,
)
from streamd.readers.depth import DepthController as Controller

MB = 1_000_000
RUN_BYTES = 8000 * MB
NOISE_BYTES = 16 * MB
BUNCH_GAP_S = 7e-6
SLABS = {
    "1.6 MB": (1_626_112,),
    "10 MB, cut as the reader does": (15 << 18, 15 << 18, 2_138_112),
}


@dataclass(frozen=True)
class Disk:
    """It gives its peak to `knee_bytes` in flight, a share to fewer, and loses `decline` beyond.

    decline: of the rate, for each 8 MB. bunched: all that is in flight is answered at once.
    While more than `tires_at_bytes` are in flight it gets tired, within `lag_s`, and recovers as
    slowly: then it gives `fresh_gain` more at first and loses `tired_loss` in the end.
    """

    peak: float
    knee_bytes: float
    decline: float = 0.0
    bunched: bool = False
    tires_at_bytes: float = math.inf
    tired_loss: float = 0.0
    fresh_gain: float = 0.0
    lag_s: float = 0.3

    def rate(self, in_flight_bytes: float, tired: float = 0.0) -> float:
        """tired: from 0 to 1."""
        beyond = max(0.0, in_flight_bytes - self.knee_bytes) / (8 * MB)
        share = min(1.0, in_flight_bytes / self.knee_bytes)
        gain = self.fresh_gain if in_flight_bytes > self.tires_at_bytes else 0.0
        lost = self.tired_loss * tired
        return self.peak * share * (1 - self.decline * beyond) * (1 + gain - lost)

    def tired_after(self, tired: float, in_flight_bytes: float, elapsed_s: float) -> float:
        becomes = float(in_flight_bytes > self.tires_at_bytes)
        return becomes + (tired - becomes) * math.exp(-elapsed_s / self.lag_s)


NVME = Disk(7e9, 2.3 * MB)  # 1.6 MB on the way, and what it gives within a latency of 90 us
TIRING = Disk(2e9, 6 * MB, tires_at_bytes=8 * MB, tired_loss=0.15)
TEMPTING = Disk(2e9, 6 * MB, tires_at_bytes=8 * MB, tired_loss=0.3, fresh_gain=0.15)


class Drive:
    """A disk that is kept busy for a controller. limits: bytes read under each."""

    def __init__(self, controller, sizes=SLABS["1.6 MB"], noise=0.0, seed=1):
        self.controller = controller
        self.now_s = 0.0
        self.done_bytes = 0
        self.limits: dict[int, int] = {}
        self._sizes, self._next_size = cycle(sizes), 0
        self._random, self._noise, self._factor, self._noise_left = random.Random(seed), noise, 1, 0
        self._in_flight: deque[int] = deque()
        self._tired = 0.0

    def read(self, disk: Disk, size_bytes: int = RUN_BYTES) -> float:
        """So much of it; bytes a second."""
        started_s, started_bytes = self.now_s, self.done_bytes
        while (read_bytes := self.done_bytes - started_bytes) < size_bytes:
            self._fill()
            in_flight_bytes = sum(self._in_flight)
            if self._noise_left <= 0:
                self._noise_left = NOISE_BYTES
                self._factor = max(0.2, self._random.gauss(1, self._noise))
            count = len(self._in_flight) if disk.bunched else 1
            ending = [self._in_flight.popleft() for _ in range(count)]
            took_s = sum(ending) / (disk.rate(in_flight_bytes, self._tired) * self._factor)
            self._tired = disk.tired_after(self._tired, in_flight_bytes, took_s)
            self.now_s += took_s
            self._noise_left -= sum(ending)
            for number, size in enumerate(ending):
                limit = self.controller.limit_bytes
                self.limits[limit] = self.limits.get(limit, 0) + size
                self.done_bytes += size
                self.controller.ended(size, self.now_s + number * BUNCH_GAP_S)
        return read_bytes / (self.now_s - started_s)

    def _fill(self) -> None:
        in_flight_bytes = sum(self._in_flight)
        while True:
            self._next_size = self._next_size or next(self._sizes)
            fits = in_flight_bytes + self._next_size <= self.controller.limit_bytes
            if self._in_flight and not fits:
                return
            self._in_flight.append(self._next_size)
            in_flight_bytes += self._next_size
            self._next_size = 0


@cache
def _best_limit_bytes(disk: Disk, sizes: tuple[int, ...]) -> int:
    limits = [int(disk.knee_bytes) + more * MB for more in range(0, 9, 2)]
    return max(limits, key=lambda limit: Drive(Controller.fixed(limit), sizes).read(disk, 300 * MB))


def _median_share(disk: Disk, sizes: tuple[int, ...], noise: float) -> float:
    """Of the rate that the best fixed limit has with the same noise."""
    shares = []
    for seed in range(5):
        fixed = Controller.fixed(_best_limit_bytes(disk, sizes))
        best = Drive(fixed, sizes, noise, seed).read(disk)
        shares.append(Drive(Controller(), sizes, noise, seed).read(disk) / best)
    return statistics.median(shares)


@pytest.mark.parametrize("noise", [0.05, 0.1])
@pytest.mark.parametrize("slab", SLABS)
@pytest.mark.parametrize(
    "disk",
    [
        Disk(3e9, 20 * MB),
        Disk(3e9, 20 * MB, bunched=True),
        Disk(1.7e9, 13 * MB, decline=0.01),
        Disk(1.7e9, 13 * MB, decline=0.01, bunched=True),
        Disk(1.7e9, 13 * MB, decline=0.02),
        Disk(3e9, 60 * MB),
        Disk(3e9, 60 * MB, bunched=True),
        Disk(7e9, 12 * MB),
        NVME,
        TIRING,
    ],
    ids=str,
)
def test_it_reaches_nearly_the_rate_of_the_best_limit(disk, slab, noise):
    assert _median_share(disk, SLABS[slab], noise) >= 0.95


def test_what_a_deeper_queue_brings_for_tenths_of_a_second_only_is_not_kept():
    shares = []
    for seed in range(5):
        drive = Drive(Controller(), noise=0.1, seed=seed)
        drive.read(TEMPTING)
        shares.append(drive.read(TEMPTING, 2 * RUN_BYTES) / TEMPTING.peak)
    assert statistics.median(shares) >= 0.95


def test_a_disk_has_time_to_settle_before_a_long_window_counts():
    """A limit is held for a short window, for both times of a slow one, or between two trials."""
    controller = Controller()
    drive = Drive(controller, noise=0.05)
    held_s, began_s, limit_bytes = [], 0.0, controller.limit_bytes
    while drive.now_s < 60.0:
        drive.read(TEMPTING, 1)
        if controller.limit_bytes != limit_bytes:
            held_s.append(drive.now_s - began_s)
            began_s, limit_bytes = drive.now_s, controller.limit_bytes
    slow_s = SLOW_SETTLE_S + SLOW_WINDOW_S
    assert any(slow_s <= held < 1.2 * slow_s for held in held_s)
    assert not any(0.5 * SLOW_WINDOW_S < held < slow_s for held in held_s)


@pytest.mark.parametrize("start", [MIN_LIMIT_BYTES, 32 << 20, MAX_LIMIT_BYTES])
@pytest.mark.parametrize(
    ("bandwidth", "latency_s"), [(7e9, 2e-3), (1.5e9, 4e-3), (3e9, 1e-3), (7e9, 80e-6)]
)
def test_it_keeps_the_drive_busy_with_little_more_than_it_needs(start, bandwidth, latency_s):
    disk = Disk(bandwidth, bandwidth * latency_s)
    drive = Drive(Controller(start), (1 << 20,))
    drive.read(disk, 4 * RUN_BYTES)
    drive.limits.clear()
    assert drive.read(disk, 2 * RUN_BYTES) > 0.98 * bandwidth
    most_used = max(drive.limits, key=drive.limits.__getitem__)
    assert most_used < max(3 * disk.knee_bytes, 2 * MIN_LIMIT_BYTES)


def test_trials_cost_less_than_a_hundredth_in_the_end():
    disk = Disk(3e9, 30 * MB)
    drive = Drive(Controller())
    drive.read(disk, 4 * RUN_BYTES)
    assert drive.read(disk, 8 * RUN_BYTES) > 0.99 * disk.peak


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Disk(1.7e9, 13 * MB, decline=0.01), Disk(3e9, 64 * MB)),
        (Disk(3e9, 64 * MB), Disk(1.7e9, 13 * MB, decline=0.01)),
        (Disk(7e9, 12 * MB), Disk(1e9, 48 * MB)),
    ],
    ids=str,
)
def test_it_adapts_to_a_disk_that_changes(before, after):
    shares = []
    for seed in range(5):
        drive = Drive(Controller(), noise=0.05, seed=seed)
        drive.read(before)
        best = Controller.fixed(_best_limit_bytes(after, SLABS["1.6 MB"]))
        shares.append(drive.read(after) / Drive(best, noise=0.05, seed=seed).read(after))
    assert statistics.median(shares) >= 0.94


def test_the_start_is_where_most_disks_are_busy_and_the_first_step_is_soon():
    controller = Controller()
    assert controller.limit_bytes == START_LIMIT_BYTES
    drive = Drive(controller)
    drive.read(Disk(3e9, 60 * MB), 500 * MB)
    assert controller.limit_bytes >= 60 * MB


def test_of_limits_as_good_as_each_other_the_smaller_one_is_held():
    drive = Drive(Controller(MAX_LIMIT_BYTES))
    drive.read(Disk(3e9, 5 * MB), 4 * RUN_BYTES)
    assert min(drive.limits) < 8 * MB
    drive.limits.clear()
    drive.read(Disk(3e9, 5 * MB))
    assert max(drive.limits, key=drive.limits.__getitem__) < 16 * MB


def test_bounds_hold_for_any_rate():
    controller = Controller()
    rng = random.Random(2)
    now_s = 0.0
    for _ in range(20_000):
        now_s += rng.choice([0.0, 1e-6, 1e-4, 1e-1])
        controller.ended(1 << 20, now_s)
        assert MIN_LIMIT_BYTES <= controller.limit_bytes <= MAX_LIMIT_BYTES


def test_a_fixed_one_stays():
    drive = Drive(Controller.fixed(20 * MB))
    drive.read(Disk(3e9, 64 * MB))
    assert drive.limits.keys() == {20 * MB}


def test_a_window_with_a_pause_is_not_judged():
    controller = Controller()
    before = controller.limit_bytes
    now_s = 0.0
    for _ in range(1000):
        now_s += 1e-3
        controller.ended(1 << 20, now_s)
        controller.idle()
    assert controller.limit_bytes == before


def test_bursts_too_short_for_a_slow_trial_do_not_end_all_trials():
    drive = Drive(Controller(), noise=0.05)

    def read_in_bursts(disk: Disk, count: int, size_bytes: int) -> None:
        for _ in range(count):
            drive.read(disk, size_bytes)
            drive.controller.idle()

    read_in_bursts(TEMPTING, 30, 1000 * MB)
    assert max(drive.limits) < 40 * MB
    read_in_bursts(Disk(3e9, 60 * MB), 60, 300 * MB)
    assert max(drive.limits) >= 60 * MB


def test_a_trial_is_not_left_in_force_when_the_disk_falls_idle():
    """Many short bursts would otherwise all be read at a limit that was only tried."""
    disk = Disk(3e9, 20 * MB)
    drive = Drive(Controller())
    drive.read(disk, 4 * RUN_BYTES)
    held = max(drive.limits, key=drive.limits.__getitem__)
    while drive.controller.limit_bytes == held:
        drive.read(disk, MB)
    drive.controller.idle()
    drive.limits.clear()
    for _ in range(100):
        drive.read(disk, 20 * MB)
        drive.controller.idle()
    assert drive.limits.keys() == {held}
    drive.read(disk, 2 * RUN_BYTES)
    assert max(drive.limits, key=drive.limits.__getitem__) == held
