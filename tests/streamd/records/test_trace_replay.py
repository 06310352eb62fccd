"""Traces read back, and replayed through the daemon's choice of victims."""

import json

import numpy as np
import pytest
from replay_tiers import TwoTiers
from replay_traces import load_trace

from shared.errors import ConfigError
from streamd.records.trace_replay import ReplayedTier, miss_shares, read_trace

HEADER = {
    "format": "streamd-trace",
    "version": 1,
    "model": "m.gguf",
    "n_layers": 3,
    "n_experts": 4,
    "top_k": 2,
    "layer_bytes": [0, 100, 100],
}


def a_trace(tmp_path, records, header=HEADER):
    """records: (layer, use count, experts)."""
    path = tmp_path / "x.trace"
    cells = [c for layer, uses, ids in records for c in (7, layer, uses, len(ids), *ids)]
    path.write_bytes(json.dumps(header).encode() + b"\n" + np.array(cells, "<u2").tobytes())
    return path


def test_decode_steps_are_read(tmp_path):
    records = [(1, 2, [0, 3]), (2, 40, [0, 1, 2]), (0xFFFF, 0, [9, 0]), (2, 2, [1, 2])]
    trace = read_trace(a_trace(tmp_path, records))
    assert trace.groups == [[4, 7], [9, 10]]
    assert (trace.n_layers, trace.n_experts, trace.top_k) == (3, 4, 2)


def test_a_record_cut_short_is_left_out(tmp_path):
    path = a_trace(tmp_path, [(1, 2, [0, 3]), (2, 2, [1, 2])])
    path.write_bytes(path.read_bytes()[:-3])
    assert read_trace(path).groups == [[4, 7]]


def test_of_a_long_trace_the_beginning_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("streamd.records.trace_replay.MAX_LOOKUPS", 5)
    path = a_trace(tmp_path, [(1, 2, [0, 3]), (2, 2, [1, 2]), (1, 2, [1, 2])])
    assert read_trace(path).groups == [[4, 7], [9, 10]]


@pytest.mark.parametrize(
    "change",
    [{"format": "other"}, {"n_layers": 0}, {"top_k": 5}, {"n_experts": "4"}],
)
def test_what_is_no_trace_is_refused(tmp_path, change):
    with pytest.raises(ConfigError, match="no routing trace"):
        read_trace(a_trace(tmp_path, [], HEADER | change))
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "none")


def test_a_group_is_never_evicted_for_itself():
    cache = ReplayedTier([3], [0], 8)
    rng = np.random.default_rng(4)
    for _ in range(200):
        keys = rng.choice(8, 3, replace=False).tolist()
        cache.serve(keys)
        assert cache.serve(keys) == []


def test_what_is_used_often_stays():
    hot = [[0], [1]] * 10
    (missed,) = miss_shares([*hot, [2], [3], [4], [5], *hot], [ReplayedTier([3], [0], 8)], 0)
    assert missed == 6 / 44


def test_classes_have_slots_of_their_own():
    """Two layers a class: the first class holds all of its experts, the second one half."""
    rng = np.random.default_rng(2)
    groups = [[layer * 4 + int(rng.integers(4))] for _ in range(500) for layer in range(4)]
    tier = ReplayedTier([8, 4], [0, 1, 0, 1], 4)
    missed = [group[0] for group in groups if tier.serve(group)]
    by_layer = np.bincount(np.array(missed) // 4, minlength=4)
    assert by_layer[0] == by_layer[2] == 4, "each expert once"
    assert min(by_layer[1], by_layer[3]) > 100


@pytest.mark.parametrize(("gpu_share", "host_share"), [(0.1, 0.3), (0.25, 0.5)])
def test_it_agrees_with_a_replay_of_the_policy_alone(shared_dir, gpu_share, host_share):
    """The daemon picks victims in batches; that costs two points of hits at the most."""
    trace = load_trace(shared_dir / "traces" / "qwen3-30b-a3b.route.csv")
    trace = trace.with_groups(trace.groups[: 48 * 60])
    counts = [int(share * trace.key_bytes.size) for share in (gpu_share, host_share)]
    keys = [keys for is_decode, keys in trace.groups if is_decode]
    tiers = [ReplayedTier([count], [0] * trace.n_layers, trace.n_experts) for count in counts]
    found = miss_shares(keys, tiers, len(keys) // 2)
    other = TwoTiers(warm_up=0.5).replay(
        trace.with_groups(group for group in trace.groups if group[0]), *counts
    )
    expected = (other.uploads / other.lookups, other.reads / other.lookups)
    assert found == pytest.approx(expected, abs=0.02)
