"""What tools/bench_stream.py makes of its readings, and its prefetch that knows the future."""

import numpy as np
import pytest
import torch
from measure_recall import RecallMeter
from stream_arms import ArmResult
from stream_oracle import LOOKAHEAD_ROUTERS, Oracle, Recorder

ONE, TWO = torch.zeros((1, 4)), torch.zeros((2, 4))


def _arm(**values) -> ArmResult:
    plain = {
        "arm": "off", "tokens": 10, "tps": 5.0, "wait_ms": 100.0, "compute_ms": 100.0,
        "hit_rate": 0.5, "host_hit_rate": 0.5, "disk_mb": 120.0, "useful_mb": 100.0,
        "pcie_mb": 0.0, "useful_pcie_mb": 0.0, "moe_layers": 10, "recall": None,
    }  # fmt: skip
    return ArmResult(**plain | values)


def test_the_disk_bounds_what_waits_for_it():
    """100 MB a token at 800 MB/s are 8 tokens a second; computing alone would allow 10."""
    arm = _arm().judged(800.0, None)
    assert (arm.bound_tps, arm.bound_by) == (8.0, "disk")
    assert arm.ratio == 5 / 8
    assert arm.exposed_ms == pytest.approx((200 - 125) / 10)
    assert arm.disk_busy == pytest.approx(120 * 5 / 800)
    assert arm.compute_busy == pytest.approx(0.5)


def test_the_least_bound_counts():
    assert _arm().judged(8000.0, None).bound_by == "compute"
    arm = _arm(pcie_mb=240.0, useful_pcie_mb=200.0).judged(8000.0, 1500.0)
    assert (arm.bound_tps, arm.bound_by) == (7.5, "pcie")
    assert arm.pcie_busy == pytest.approx(240 * 5 / 1500), "in vain too"
    assert _arm(useful_mb=0.0).judged(1.0, None).bound_by == "compute"


def test_with_a_lane_bus_and_cpu_share_what_the_gpu_lacks():
    """300 MB a token: 100 over a bus of 1,000 MB/s, 200 by a CPU that took 100 ms for them."""
    arm = _arm(
        pcie_mb=100.0,
        useful_pcie_mb=100.0,
        lane_mb=200.0,
        lane_ms=100.0,
        compute_ms=50.0,
        useful_mb=0.0,
    )
    judged = arm.judged(8000.0, 1000.0)
    assert judged.bound_by == "pcie+cpu"
    assert judged.bound_tps == pytest.approx((1000 + 2000) / 300)
    assert judged.pcie_busy == pytest.approx(100 * 5 / 1000)


class Sink:
    def __init__(self):
        self.here, self.hints = set(), []

    def absent(self, layer, experts):
        return np.array([(layer, int(expert)) not in self.here for expert in experts])

    def hint(self, layer, experts, layers_ahead):
        self.hints.append((layer, experts.tolist(), layers_ahead))


def _ids(*experts):
    return np.array([experts], np.int32)


def test_what_is_recorded_is_hinted_before_it_is_read():
    recorder = Recorder()
    recorder.look(0, ONE)  # a layer without experts
    recorder.look(1, TWO, None, np.zeros((2, 2), np.int32))  # of a prompt
    text = [(1, _ids(3, 4)), (2, _ids(5, 6)), (1, _ids(7, 8)), (2, _ids(3, 4))]
    for layer, ids in text:
        recorder.look(layer, ONE, None, ids)
    sink = Sink()
    sink.here.add((2, 5))
    oracle = Oracle(recorder.choices, sink)
    oracle.look(*(1, ONE, None, text[0][1]))
    assert sink.hints == [(2, [6], 1), (1, [7, 8], 2), (2, [3, 4], 3)]
    sink.hints.clear()
    oracle.look(*(2, ONE, None, text[1][1]))
    assert not sink.hints
    assert oracle.hinted_count == 5
    with pytest.raises(AssertionError, match="another text"):
        oracle.look(*(1, ONE, None, _ids(0, 1)))


def test_the_oracle_looks_no_farther_than_hints_live():
    choices = [(1, np.array([place % 8])) for place in range(2 * LOOKAHEAD_ROUTERS)]
    sink = Sink()
    Oracle(choices, sink).look(1, ONE, None, _ids(0))
    assert max(ahead for *_, ahead in sink.hints) == LOOKAHEAD_ROUTERS


def test_recall_counts_by_distance_and_rank():
    meter = RecallMeter([1, 2, 3], n_layers=4, top_k=2)
    assert meter.targets(0) == [(1, 1), (2, 2), (3, 3)]
    assert meter.targets(2) == [(1, 3)]
    meter.counting = True
    meter.forecast({(1, 2): np.array([4, 9, 5, 0]), (2, 3): np.array([1, 2, 3, 4])})
    meter.chosen(2, [4, 5])
    meter.chosen(3, [1, 2])
    assert (meter.recall(1, 2), meter.recall(1, 4)) == (0.5, 1.0)
    assert meter.recall(2, 2) == 1.0
