"""Statistics for people, of numbers by hand."""

import pytest

from shared.stats_view import counted, duration, render_stats

NO_AHEAD = {
    "prefetch": {"issued": 0, "useful": 0, "late": 0, "wasted": 0},
    "backfill": {"slabs": 0, "bytes": 0},
}
HOST = {"slots": 8, "slots_used": 5, "bytes": 4_000_000, "hits": 30, "misses": 10, "evictions": 2}


def values(**host):
    io = {"engine": "pread", "bytes_read": 5_000_000, "reads": 40}
    return {
        "name": "demo", "pid": 7, "model": "/m.gguf", "uptime_s": 61.0, "resident_bytes": 1500,
        "fault": None,
        "io": io | {"latency_ms_p50": 0.5, "latency_ms_p99": 2.0},
        "tiers": {"host": HOST | NO_AHEAD | host, "gpu": {"slots": 0} | NO_AHEAD},
        "clients": [
            {"client": 0, "pid": 9, "tokens": 4, "hits": 3, "misses": 1}
            | {"own_hits": 0, "own_misses": 0}
        ],
        "since_last": {"seconds": 2.0, "hits": 0, "misses": 0, "evictions": 0, "bytes_read": 4e6},
    }  # fmt: skip


def test_a_screenful():
    text = render_stats(values())
    assert "demo  pid 7  up 1m01s" in text
    assert "host      5 of 8 slots, 4.00 MB, resident tensors 1.50 kB" in text
    assert "lookups   40 lookups, 75.0% hits, 2 evictions" in text
    assert "4.00 MB, 2.0 MB/s" in text
    assert "  0   pid 9        4 tokens, 4 lookups, 75.0% hits" in text
    assert "gpu" not in text
    assert "ahead" not in text


def test_a_fault_comes_first():
    fault = "/m.gguf has been replaced (streamd reload takes the file as it is now)"
    first, second, *_ = render_stats(values() | {"fault": fault}).splitlines()
    assert first == f"fault     {fault}"
    assert "demo" in second


def test_what_was_brought_before_it_was_asked_for():
    ahead = {"issued": 9, "useful": 5, "late": 1, "wasted": 3}
    text = render_stats(values(prefetch=ahead, backfill={"slabs": 12, "bytes": 1}))
    assert "ahead     host: 5 useful, 1 late, 3 wasted; 12 while idle" in text


def test_what_was_not_brought_ahead_is_not_told():
    text = render_stats(values(backfill={"slabs": 12, "bytes": 1}))
    assert "ahead     host: 12 while idle" in text
    ahead = {"issued": 9, "useful": 5, "late": 1, "wasted": 3}
    assert "ahead     host: 5 useful, 1 late, 3 wasted\n" in render_stats(values(prefetch=ahead))


def test_counted_nouns():
    assert [counted(n, "layer") for n in (0, 1, 1200)] == ["0 layers", "1 layer", "1,200 layers"]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.5, "0.5s"), (60, "1m00s"), (3599, "59m59s"), (7260, "2h01m")]
)
def test_durations(seconds, shown):
    assert duration(seconds) == shown


def test_a_client_with_gpu_slots_of_its_own():
    own = values()
    assert "of its own" not in render_stats(own)
    own["clients"][0] |= {"own_hits": 90, "own_misses": 10}
    line = next(line for line in render_stats(own).splitlines() if "pid 9" in line)
    assert line.endswith("; in GPU slots of its own 100 lookups, 90.0% hits")
