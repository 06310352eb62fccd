"""Who brings the missing experts: both lanes end together, and what is measured is followed."""

import numpy as np
import pytest

from infer.lane.policy import Arrivals, LanePolicy

SLAB = 5_000_000


class Bench:
    """Bus, disk and CPU of given speeds; `run` plays layers and tells the policy what it saw."""

    def __init__(self, upload_s: float, disk_s: float, cpu_s: float) -> None:
        self.policy = LanePolicy(SLAB)
        self.speeds = upload_s, disk_s, cpu_s
        self.read_here: list[bool] = []

    def run(self, host_count: int, disk_count: int, layers: int = 400) -> list[int]:
        """How many were computed in each layer."""
        upload_s, disk_s, cpu_s = self.speeds
        counts = []
        for _ in range(layers):
            computed, reads = self.policy.share(host_count, disk_count)
            counts.append(computed)
            self.read_here.append(reads)
            uploads = host_count - computed
            computed_s = 1e-4 + cpu_s * computed if computed else 0.0
            if computed:
                self.policy.started(1e-4)
                self.policy.compute.note(computed, cpu_s * computed)
            if reads:
                self.policy.compute.note(1, cpu_s)
                read_s = 3e-4 + disk_s * disk_count
                late = read_s > computed_s
                (self.policy.disk.note if late else self.policy.disk.note_at_most)(
                    disk_count, max(read_s, computed_s)
                )
            ends = [2e-4 + upload_s * (n + 1) for n in range(uploads)]
            free_s = ends[-1] if ends else 0.0
            for n in range(0 if reads else disk_count):
                free_s = max(free_s, 3e-4 + disk_s * (n + 1)) + upload_s
                ends.append(free_s)
            fetched = range(len(ends))
            host, disk = set(fetched[:uploads]), set(fetched[uploads:])
            arrivals = Arrivals(self.policy, host, disk)
            early = {n for n in fetched if ends[n] <= computed_s}
            if early:
                arrivals.note(early, computed_s, True)
            for n in set(fetched) - early:
                arrivals.note({n}, ends[n], False)
            if not (computed or reads):
                self.policy.not_computed()
        return counts


@pytest.mark.parametrize(
    ("upload_ms", "cpu_ms", "best"), [(0.4, 0.4, 2), (0.4, 0.2, 3), (0.4, 1.2, 1), (0.1, 4.0, 0)]
)
def test_both_lanes_end_together(upload_ms, cpu_ms, best):
    counts = Bench(upload_ms / 1e3, 7e-4, cpu_ms / 1e3).run(4, 0)
    assert np.mean(counts[-200:]) == pytest.approx(best, abs=0.5)


def test_while_the_disk_is_waited_for_bus_and_cpu_are_done_first():
    """Two of the disk take 1.7 ms, in which four host hits can go either way."""
    for upload_s, cpu_s, best in ((1e-4, 1e-4, 2), (1e-4, 4e-4, 1), (3e-4, 5e-5, 4)):
        counts = Bench(upload_s, 8e-4, cpu_s).run(4, 2)
        assert np.mean(counts[-200:]) == pytest.approx(best, abs=0.8)


def test_what_was_read_goes_to_whoever_is_done_with_it_sooner():
    for upload_s, cpu_s, reads in ((1e-4, 8e-4, 0), (4e-4, 1.5e-4, 1)):
        bench = Bench(upload_s, 8e-4, cpu_s)
        bench.run(2, 2)
        assert np.mean(bench.read_here[-200:]) == pytest.approx(reads, abs=0.2)


def test_a_slow_bus_leaves_all_to_the_cpu():
    bench = Bench(2e-3, 1e-4, 1e-4)
    assert np.mean(bench.run(3, 4)[-200:]) > 2.7
    assert np.mean(bench.read_here[-200:]) > 0.9


def test_a_cpu_that_has_become_fast_again_is_found_out():
    bench = Bench(4e-4, 7e-4, 50e-3)
    assert np.mean(bench.run(3, 0)[-100:]) < 0.3
    bench.speeds = 4e-4, 7e-4, 2e-4
    assert np.mean(bench.run(3, 0, 1500)[-100:]) > 1.5


def test_nothing_in_host_slots_leaves_nothing_to_compute():
    assert LanePolicy(SLAB).share(0, 5)[0] == 0
    assert LanePolicy(SLAB).share(3, 0)[1] is False


@pytest.mark.parametrize(("reads", "expected"), [(False, [2, 4]), (True, [2, 4, 1])])
def test_the_hottest_are_uploaded(reads, expected):
    policy = LanePolicy(SLAB)
    policy.share = lambda *counts: (2, reads) if counts == (4, 1) else None
    in_host = np.array([True, False, True, True, True])
    split = policy.split(in_host, np.array([7, 90, 2, 9, 2]))
    assert split.computed.tolist() == expected
    assert split.uploaded.tolist() == [0, 3]
    assert split.read.tolist() == ([] if reads else [1])


def test_the_last_of_a_kind_tells_how_long_it_took():
    policy = LanePolicy(SLAB)
    noted = []
    for name in ("upload", "disk"):
        pace = getattr(policy, name)
        pace.note = lambda count, s, n=name: noted.append((n, count, s))
        pace.note_at_most = lambda count, s, n=name: noted.append((n, count, s, "at most"))
    arrivals = Arrivals(policy, {1, 4}, {2})
    arrivals.note({1}, 0.1, True)
    arrivals.note({2, 4}, 0.3, False)
    read_s = pytest.approx(0.3 - policy.upload.each_s)
    assert noted == [("upload", 2, 0.3), ("disk", 1, read_s)]
    noted.clear()
    Arrivals(policy, {0}, set()).note({0}, 0.2, True)
    assert noted == [("upload", 1, 0.2, "at most")]
