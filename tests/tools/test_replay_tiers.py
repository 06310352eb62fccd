"""Two tiers in a row: hand-made traces, and what must hold for any."""

import numpy as np
import pytest
from replay_simulation import make_policy, simulate, simulate_by_layer
from replay_tiers import TwoTiers
from replay_traces import Trace


def a_trace(*groups, n_layers=1, n_experts=8):
    keys = tuple((True, tuple(group)) for group in groups)
    return Trace("hand", n_layers, n_experts, np.ones(n_layers * n_experts, np.int64), keys)


@pytest.fixture(scope="module")
def skewed():
    rng = np.random.default_rng(7)
    weights = (np.arange(40) + 1.0) ** -1
    popular = [rng.choice(40, 3, replace=False, p=weights / weights.sum()) for _ in range(1500)]
    return a_trace(*(keys.tolist() for keys in popular), n_experts=40)


def test_the_host_sees_what_the_gpu_misses():
    counts = TwoTiers(policies=("lru", "lru")).replay(a_trace([0], [0], [1], [0], [1]), 1, 2)
    assert (counts.lookups, counts.uploads, counts.reads, counts.write_backs) == (5, 4, 2, 0)


def test_a_victim_of_the_gpu_is_written_back_where_there_is_no_copy_of_it():
    """Four slabs in turn, and three host slots: inclusive tiers never hold the one in turn."""
    loop = [[key % 4] for key in range(80)]
    apart = TwoTiers("exclusive").replay(a_trace(*loop), 2, 3)
    assert apart.reads == 4, "each once"
    together = TwoTiers(policies=("lru", "lru")).replay(a_trace(*loop), 2, 3)
    assert together.reads == 80


@pytest.mark.parametrize("copy_weight", [0, 1 / 16])
def test_exclusive_tiers_read_less_and_upload_the_same(skewed, copy_weight):
    plain = TwoTiers(warm_up=0.2).replay(skewed, 12, 15)
    apart = TwoTiers("exclusive", warm_up=0.2, copy_weight=copy_weight).replay(skewed, 12, 15)
    assert apart.uploads == plain.uploads
    assert apart.reads < 0.9 * plain.reads
    assert apart.write_backs <= apart.uploads


def test_without_a_need_for_room_nothing_is_written_back(skewed):
    counts = TwoTiers("exclusive").replay(skewed, 6, 40)
    assert (counts.write_backs, counts.reads) == (0, 40)


def test_warm_up_is_not_counted():
    trace = a_trace([0], [1], [0], [1])
    counts = TwoTiers(warm_up=0.5).replay(trace, 2, 2)
    assert (counts.tokens, counts.lookups, counts.uploads) == (2, 2, 0)
    policy = make_policy("lru", trace, 2)
    assert simulate(trace, 2, policy, 0.5).hit_pct == 100


def test_a_cache_for_each_layer():
    """Layer 0 uses one expert, layer 1 three: a cache for both serves them better."""
    groups = [group for step in range(60) for group in ([0], [4 + step % 3])]
    trace = a_trace(*groups, n_layers=2, n_experts=4)
    apart = simulate_by_layer(trace, 4, "lru", 1.0)
    whole = simulate(trace, 4, make_policy("lru", trace, 4))
    assert (apart.lookups, apart.hits) == (120, 59)
    assert whole.hits == 120 - 4
