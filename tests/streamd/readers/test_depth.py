"""The depth controller on simulated drives: rate = min(bandwidth, in flight / latency)."""

import random

import pytest

from streamd.readers.depth import MAX_LIMIT_BYTES, MIN_LIMIT_BYTES, DepthController


def _drive(controller, bandwidth, latency_s, read_bytes, reads=20_000, noise=0.0, seed=1):
    """Run reads through a drive; the mean rate of the second half over the bandwidth."""
    rng = random.Random(seed)
    now_s = half_s = 0.0
    for number in range(reads):
        if number == reads // 2:
            half_s = now_s
        in_flight = max(read_bytes, controller.limit_bytes // read_bytes * read_bytes)
        rate = min(bandwidth, in_flight / latency_s) * (1 + rng.uniform(-noise, noise))
        now_s += read_bytes / rate
        controller.ended(read_bytes, now_s)
    return read_bytes * (reads // 2) / (now_s - half_s) / bandwidth


@pytest.mark.parametrize("start", [MIN_LIMIT_BYTES, 32 << 20, MAX_LIMIT_BYTES])
@pytest.mark.parametrize(
    ("bandwidth", "latency_s"), [(7e9, 2e-3), (1.5e9, 4e-3), (3e9, 1e-3), (7e9, 80e-6)]
)
def test_it_keeps_the_drive_busy_with_little_more_than_it_needs(start, bandwidth, latency_s):
    controller = DepthController(start)
    share = _drive(controller, bandwidth, latency_s, 1 << 20)
    needed = bandwidth * latency_s
    assert share > 0.93
    assert controller.limit_bytes < max(3 * needed, 2 * MIN_LIMIT_BYTES)


def test_noise_does_not_run_away_with_it():
    controller = DepthController()
    share = _drive(controller, 3e9, 4e-3, 1 << 20, noise=0.1)
    assert share > 0.85


def test_bounds_hold_for_any_rate():
    controller = DepthController()
    rng = random.Random(2)
    now_s = 0.0
    for _ in range(20_000):
        now_s += rng.choice([1e-6, 1e-4, 1e-1])
        controller.ended(1 << 20, now_s)
        assert MIN_LIMIT_BYTES <= controller.limit_bytes <= MAX_LIMIT_BYTES


def test_a_window_with_a_pause_is_not_judged():
    controller = DepthController()
    before = controller.limit_bytes
    now_s = 0.0
    for _ in range(1000):
        now_s += 1e-3
        controller.ended(1 << 20, now_s)
        controller.idle()
    assert controller.limit_bytes == before
