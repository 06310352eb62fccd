"""Rates over windows of time, against sums by hand; and what a terminal is shown of them."""

import pytest

from streamd.monitoring.stats_history import MAX_SAMPLES, History, value_at
from streamd.monitoring.stats_line import percent, render_line
from streamd.monitoring.stats_screen import sparkline
from streamd.monitoring.stats_watch import flatten, line_values


def answer(uptime_s, hits=0, misses=0, **changes):
    empty = {"hits": 0, "misses": 0, "evictions": 0, "slots": 0, "layer_misses": []}
    host = empty | {"hits": hits, "misses": misses, "slots": 8, "layer_misses": [misses, 0]}
    io = {"bytes_read": 1000 * misses, "latency_ms_p99": 2.5, "engine": "pread"}
    values = {"uptime_s": uptime_s, "tokens": 10 * uptime_s, "clients": [], "io": io}
    return values | {"tiers": {"host": host, "gpu": empty}} | changes


@pytest.fixture
def history():
    """An answer each second from 100 s on: a hit each second, and a miss in the first 90 only."""
    clock = iter(range(1000))
    history = History(now_s=lambda: float(next(clock)))
    for second in range(100):
        history.add(answer(100.0 + second, hits=second + 1, misses=min(second + 1, 90)))
    return history


def test_hit_rates_of_three_windows(history):
    assert history.hit_share("host", 1.0) == 1.0
    assert history.hit_share("host", 60.0) == pytest.approx(60 / (60 + 50))
    assert history.hit_share("host", None) == pytest.approx(100 / 190)
    assert history.hit_share("gpu", None) is None, "nothing was looked up there"


def test_rates_of_counters(history):
    assert history.rate("io.bytes_read", 1.0) == 0
    assert history.rate("io.bytes_read", 60.0) == pytest.approx(50 * 1000 / 60)
    assert history.rate("io.bytes_read", None) == pytest.approx(90 * 1000 / 199)
    assert history.rate("tokens", 1.0) == pytest.approx(10)
    assert history.layer_growth("host", 60.0) == [50, 0]
    assert history.layer_growth("host", None) == [90, 0]


def test_a_single_answer_has_no_rates_yet():
    history = History()
    history.add(answer(500.0, hits=7, misses=3))
    assert history.hit_share("host", 1.0) is None
    assert history.rate("tokens", 60.0) == 0
    assert history.hit_share("host", None) == 0.7


def test_a_daemon_started_anew_begins_anew(history):
    history.add(answer(1.0, hits=3, misses=1))
    assert history.growth("tiers.host.hits", 60.0) == 0
    history.add(answer(2.0, hits=5, misses=1))
    assert history.growth("tiers.host.hits", 60.0) == 2


def test_it_does_not_grow_for_ever(history):
    for second in range(MAX_SAMPLES):
        history.add(answer(1000.0 + second))
    assert len(history._samples) == MAX_SAMPLES


def test_tokens_a_second_of_a_client():
    clock = iter(range(10))
    history = History(now_s=lambda: float(next(clock)))
    client = {"client": 0, "pid": 1, "tokens": 30}
    history.add(answer(1.0, clients=[client]))
    history.add(answer(2.0, clients=[client | {"tokens": 42}]))
    assert history.client_rate(history.now["clients"][0], 1.0) == 12
    # Another one that has got its number.
    history.add(answer(3.0, clients=[client | {"pid": 2, "tokens": 5}]))
    assert history.client_rate(history.now["clients"][0], 1.0) == 5


def test_the_line_of_a_pipe(history):
    line = render_line(history)
    assert line == (
        "host hits 100.0%  disk 0.0 MB/s p99 2.5 ms  evictions 0/s  clients 0  10.0 t/s"
    )
    assert percent(None) == "-"


@pytest.mark.parametrize(
    ("values", "top", "drawn"),
    [
        ([], None, ""),
        ([0, 0], None, "··"),
        ([0, 1, 4, 8], None, "·▁▄█"),
        ([0, 1, 100, 200], 200, "·▁▄█"),
        ([9], 8, "█"),
    ],
)
def test_sparklines(values, top, drawn):
    assert sparkline(values, top) == drawn


def test_a_line_counts_from_the_line_before():
    io = {"bytes_read": 0, "reads": 0}
    told = {"seconds": 9.8765, "hits": 5, "misses": 1, "evictions": 0, "bytes_read": 7, "reads": 1}
    history = History()
    history.add(answer(100.0, hits=5, misses=1, io=io, since_last=told))
    assert line_values(history)["since_last"] == told | {"seconds": 9.877}
    for second, hits in ((1, 8), (2, 8), (3, 12)):
        now = answer(
            100.0 + second * 1.0004, hits=hits, misses=second + 1, since_last=told | {"hits": 99},
            io={"bytes_read": 500 * second, "reads": second},
        )  # fmt: skip
        history.add(now)
        assert line_values(history)["since_last"] == {
            "seconds": 1.0, "hits": {1: 3, 2: 0, 3: 4}[second], "misses": 1, "evictions": 0,
            "bytes_read": 500, "reads": 1,
        }  # fmt: skip
    assert history.now is now, "what it was told is left as it was"
    assert now["since_last"]["hits"] == 99


def test_the_columns_of_a_table():
    values = {"a": 1, "b": {"c": 2.5, "list": [1, 2], "text": "x"}, "yes": True}
    assert dict(flatten(values | {"since_last": {"hits": 3}})) == {"a": 1, "b.c": 2.5}
    assert value_at(values, "b.c") == 2.5
    assert value_at(values, "b.absent.c") == value_at(values, "b.text") == 0
