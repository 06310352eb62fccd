"""The replay tool: hand-made traces with known answers, and a curve computed by others."""

import csv
from collections import deque

import numpy as np
import pytest
import replay
from replay_policies import Belady
from replay_simulation import POLICIES, make_policy, simulate
from replay_traces import Trace, load_trace

from shared.command import run_command
from shared.errors import ConfigError

# A header and one section: request 0, layer 0, 1 use, 1 expert, which is number 0.
DAEMON_TRACE_OF_ONE_LOOKUP = (
    b'{"format": "streamd-trace", "n_layers": 1, "n_experts": 8, "top_k": 1, "layer_bytes": [9]}\n'
    + bytes((0, 0, 0, 0, 1, 0, 1, 0, 0, 0))
)


def _trace(*groups, n_experts=8, size=1):
    keys = tuple((True, tuple(group)) for group in groups)
    return Trace("hand", 1, n_experts, np.full(n_experts, size, np.int64), keys)


def _hits(policy, trace, capacity):
    return simulate(trace, capacity, make_policy(policy, trace, capacity)).hits


def test_a_loop_one_longer_than_the_cache_is_lrus_worst_case():
    trace = _trace(*[[key % 4] for key in range(40)])
    assert _hits("lru", trace, 3) == 0
    assert _hits("belady", trace, 3) > 20


def test_lfu_keeps_what_is_used_often_through_a_scan():
    hot = [[0], [1]] * 10
    trace = _trace(*hot, [2], [3], [4], [5], *hot)
    assert _hits("lfu", trace, 3) == 18 + 20
    assert _hits("lru", trace, 3) == 18 + 18


@pytest.mark.parametrize("policy", ["w-tinylfu", "slru"])
def test_what_came_once_does_not_push_out_what_is_used_often(policy):
    hot = [[key] for key in range(6)] * 20
    scan = [[key] for key in range(6, 40)]
    trace = _trace(*hot, *scan, *hot, n_experts=40)
    assert _hits(policy, trace, 8) >= 114 + 120 - 8
    assert _hits("lru", trace, 8) == 114 + 114


def test_ageing_forgets_what_was_hot():
    trace = _trace(*[[0], [1]] * 300, *[[2], [3], [4]] * 60, n_experts=5)
    assert _hits("lfu-ageing", trace, 3) > _hits("lfu", trace, 3) + 30


def test_belady_is_the_best_there_is_on_random_lookups():
    rng = np.random.default_rng(3)
    trace = _trace(*[rng.choice(8, 2, replace=False).tolist() for _ in range(400)])
    best = _hits("belady", trace, 4)
    assert all(_hits(name, trace, 4) <= best for name in POLICIES)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_for_everything_misses_each_key_once(policy):
    trace = _trace(*[[key % 8] for key in range(80)])
    result = simulate(trace, 8, make_policy(policy, trace, 8))
    assert (result.hits, result.read_bytes) == (72, 8)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_budget_holds_and_the_group_served_stays(policy):
    rng = np.random.default_rng(5)
    trace = _trace(*[rng.choice(8, 3, replace=False).tolist() for _ in range(300)], size=10)
    inner = make_policy(policy, trace, 4)
    inside = set()

    class Watched:
        def look_up(self, key):
            inside.add(key)
            assert len(inside) <= 4
            inner.look_up(key)

        def victim(self, protected):
            gone = inner.victim(protected)
            assert gone not in protected
            inside.remove(gone)
            return gone

    simulate(trace, 49, Watched())
    assert len(inside) == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_a_group_larger_than_the_cache(policy):
    """As a prefill's in a small cache: its last misses stay, and decoding goes on."""
    rng = np.random.default_rng(8)
    steps = [rng.choice(8, 2, replace=False).tolist() for _ in range(100)]
    trace = _trace([*range(8)], *steps, [*range(7, -1, -1)], *steps)
    result = simulate(trace, 3, make_policy(policy, trace, 3))
    assert result.lookups == 16 + 400
    assert 0 < result.hits <= result.lookups - 8


def test_belady_looks_at_the_next_use_only():
    policy = Belady({0: deque([0, 9]), 1: deque([1, 5]), 2: deque([2])})
    for key in (0, 1, 2):
        policy.look_up(key)
    assert [policy.victim(()) for _ in range(3)] == [2, 0, 1]


def test_the_given_curve_is_reproduced(shared_dir):
    """Half a point for lru and belady, which leave nothing to choose; lfu breaks ties its way."""
    trace = load_trace(shared_dir / "traces" / "qwen3-30b-a3b.route.csv")
    with (shared_dir / "traces" / "qwen3-30b-a3b.curve.csv").open() as file:
        given = {(row["budget_mib"], row["policy"]): row for row in csv.DictReader(file)}
    checked = 0
    for (budget, policy), row in given.items():
        if policy not in ("lru", "belady") or budget not in ("250", "1000", "4000", "8000"):
            continue
        capacity = int(budget) << 20
        result = simulate(trace, capacity, make_policy(policy, trace, capacity // 2_800_000))
        assert result.hit_pct == pytest.approx(float(row["hit_pct_cum"]), abs=0.5)
        assert result.decode_hit_pct == pytest.approx(float(row["hit_pct_decode"]), abs=0.5)
        checked += 1
    assert checked == 8


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.npz", b"PK no archive"),
        ("x.npz", b"text"),
        ("x.bin", b'{"format": "streamd-trace"\n'),
        ("x.csv", b"# layer=1\n"),
        ("x.csv", b"1,2,x,4,5,6\n"),
        ("x.csv", b""),
    ],
)
def test_what_is_no_trace(name, content, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is no routing trace"):
        load_trace(path)


def test_a_trace_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        load_trace(tmp_path / "missing.csv")


@pytest.mark.parametrize(
    ("words", "cause", "remedy"),
    [
        (("missing",), "cannot read missing: No such file or directory", "give the path"),
        (("x", "--shares", "0.5,10"), "--shares 0.5,10: 1000% is more than all", "from 0 to 1"),
        (("x", "--shares", "0"), "'0' is no list of budgets", "above 0"),
        (("x", "--shares", "many"), "'many' is no list of budgets", "above 0"),
        (("x", "--policies", "lru,best"), "unknown policy 'best'", "choose of lru, lfu"),
    ],
)
def test_what_cannot_be_replayed_is_told(words, cause, remedy, tmp_path, monkeypatch, capsys):
    (tmp_path / "x").write_bytes(DAEMON_TRACE_OF_ONE_LOOKUP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["replay", *words])
    assert run_command("replay", replay.main) == 1
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith(f"replay: {cause}")
    assert remedy in told[1]
