"""Hit rates from the table and from traces, and what they allow."""

import pytest
from replay_curves import GPU_SHARES, HOST_SHARES, curve
from replay_traces import load_trace

from shared.errors import ConfigError
from streamd.planning.forecast import (
    Budget,
    Misses,
    Rates,
    bound_of,
    curve_like,
    load_curves,
    misses_by_table,
    misses_of_trace,
)
from streamd.records.trace_replay import RoutingTrace


def test_the_table_has_every_pair_of_budgets():
    for found in load_curves():
        for gpu in (0.0, *GPU_SHARES):
            for host in HOST_SHARES:
                assert found.misses(gpu, host).host <= found.misses(gpu, host).gpu <= 1


@pytest.mark.parametrize("number", [0, 1])
def test_more_slots_never_miss_more(number):
    found = load_curves()[number]
    steps = [n / 40 for n in range(41)]
    for gpu in (0.0, 0.07, 0.3):
        host_misses = [found.misses(gpu, host).host for host in steps]
        assert host_misses == sorted(host_misses, reverse=True)
        assert host_misses[-1] == 0
    gpu_misses = [found.misses(gpu, 0.5).gpu for gpu in steps]
    assert gpu_misses == sorted(gpu_misses, reverse=True)
    assert (gpu_misses[0], gpu_misses[-1]) == (1, 0)


def test_between_rows_it_goes_straight():
    found = load_curves()[0]
    low, high, middle = (found.misses(0.1, share).host for share in (0.2, 0.3, 0.25))
    assert middle == pytest.approx((low + high) / 2)
    low, high, middle = (found.misses(share, 0.3).gpu for share in (0.1, 0.15, 0.125))
    assert middle == pytest.approx((low + high) / 2)


def test_a_model_is_like_the_one_that_chooses_as_few():
    assert curve_like(8 / 192).name == "qwen3-30b-a3b"
    assert curve_like(4 / 16).name == "gpt-oss-20b"


def test_the_table_is_what_its_tool_makes(shared_dir):
    """The first rows of each kind, made anew."""
    trace = load_trace(shared_dir / "traces" / "qwen3-30b-a3b.route.csv")
    found = next(c for c in load_curves() if c.name == "qwen3-30b-a3b")
    rows = curve(trace)
    for _ in range(4):
        _, gpu, host, gpu_miss, host_miss = next(rows)
        misses = found.misses(gpu, host)
        assert (misses.gpu, misses.host) == pytest.approx((gpu_miss, host_miss), abs=1e-3)


def test_classes_count_by_their_layers():
    curve = load_curves()[0]
    budget = Budget([-1, 0, 0, 0, 1], 128, 6, host=[96, 128], gpu=[0, 64])
    misses = misses_by_table(budget)
    half, none = curve.misses(0.5, 1), curve.misses(0, 0.25)
    assert misses.gpu == pytest.approx((3 + half.gpu) / 4)
    assert misses.host == pytest.approx(3 * none.host / 4)


STEPS = [[4], [8]] * 100
LAYERS = [-1, 0, 0]


def test_a_trace_of_one_expert_a_layer_is_always_hit():
    trace = RoutingTrace(3, 4, 1, STEPS)
    misses = misses_of_trace(trace, Budget(LAYERS, 4, 1, [4], [2]), "t")
    assert (misses.gpu, misses.host) == (0, 0)
    misses = misses_of_trace(trace, Budget(LAYERS, 4, 1, [2]), "t")
    assert (misses.gpu, misses.host) == (1, 0)
    misses = misses_of_trace(trace, Budget(LAYERS, 4, 1, [2], [1]), "t")
    assert (misses.gpu, misses.host) == (1, 0)


def test_a_trace_of_nothing_says_nothing():
    trace = RoutingTrace(3, 4, 1, STEPS[:8])
    with pytest.raises(ConfigError, match="less than 16 tokens"):
        misses_of_trace(trace, Budget(LAYERS, 4, 1, [2]), "t")


def test_the_slowest_part_is_the_bound():
    bound = bound_of(Misses(0.5, 0.1, "t"), 3e9, 9e9, Rates(5e9, 13e9, 288e9), on_gpu=True)
    assert bound.tokens_per_s == pytest.approx({"disk": 5 / 0.3, "pcie": 13 / 1.5, "compute": 24})
    assert bound.limit == "pcie"


def test_rates_that_are_not_known_bound_nothing():
    bound = bound_of(Misses(1, 0.1, "t"), 3e9, 9e9, Rates(disk=3e9), on_gpu=False)
    assert bound.tokens_per_s == pytest.approx({"disk": 10})
    assert bound.pcie_bytes == 0
    assert bound_of(Misses(1, 0.1, "t"), 3e9, 9e9, Rates(), on_gpu=False).limit == ""
