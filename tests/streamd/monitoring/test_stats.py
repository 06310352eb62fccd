"""What the daemon tells about itself."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from shared.residency import TableShape
from streamd.monitoring.stats import (
    SinceLast,
    client_values,
    io_values,
    rss_bytes,
    tier_values,
    token_count,
)
from streamd.readers.slab_read import ReadStats
from streamd.sessions import Sessions


def test_lookups_are_counted_over_clients_present_and_gone(bench):
    client, other = bench.attach(0), bench.attach(1)
    bench.has_read(client, 0, [1, 2])
    client.area.count_lookups(5, 2)
    other.area.count_lookups(7, 0)
    values = tier_values(bench.cache, arena_bytes=4096)
    assert values == {
        "hits": 12, "misses": 2, "evictions": 0, "joined_reads": 0,
        "slots": 8, "slots_used": 2, "bytes": 4096,
    }  # fmt: skip
    bench.cache.detach(0)
    assert tier_values(bench.cache, 4096) == values


def test_evictions_and_joined_reads_are_counted(floor):
    first, second = floor.attach(0), floor.attach(1)
    floor.press(first, range(4))
    first.enter()
    second.enter()
    first.fetch(0, [9])
    second.fetch(0, [9])
    floor.step()
    values = tier_values(floor.cache, 0)
    assert values["joined_reads"] == 1
    assert values["misses"] == 6
    slots_left = values["slots_used"] - len(floor.cache.classes[0].limbo)
    assert values["evictions"] == 5 - slots_left


class FakeReader:
    def __init__(self, stats):
        self._stats = stats

    def stats(self):
        return self._stats


def test_io_values_are_the_readers():
    numbers = dict.fromkeys(ReadStats.__dataclass_fields__, 1)
    stats = replace(ReadStats(**numbers), engine="pread", latency_ms_p50=1.23456, bytes_read=7)
    values = io_values(FakeReader(stats))
    assert values["engine"] == "pread"
    assert values["latency_ms_p50"] == 1.235
    assert values["bytes_read"] == 7
    assert {"reads", "latency_ms_p99", "in_flight_bytes"} <= values.keys()


@pytest.fixture
def sessions():
    sessions = Sessions(TableShape(2, 16))
    yield sessions
    sessions.close()


def test_each_client_has_its_own_line(bench, sessions):
    session = sessions.prepare(pid=4321)
    sessions.add(session)
    bench.cache.attach(session.number, session.area)
    session.area.count_lookups(30, 4)
    session.area.count_fetch()
    session.area.count_tokens(6)
    session.area.note_own_lookups(500, 34)
    assert client_values(bench.cache, sessions) == [
        {
            "client": 0,
            "pid": 4321,
            "hits": 30,
            "misses": 4,
            "fetches": 1,
            "tokens": 6,
            "own_hits": 500,
            "own_misses": 34,
        }
    ]


def test_seconds_since_the_last_asking_are_rounded():
    since = SinceLast()
    since.take({"seconds": 0.1})
    assert since.peek({"seconds": 0.3}) == {"seconds": 0.2}


def test_growth_since_the_last_asking():
    since = SinceLast()
    assert since.take({"hits": 3, "seconds": 1.5}) == {"hits": 3, "seconds": 1.5}
    assert since.take({"hits": 3, "seconds": 2.0}) == {"hits": 0, "seconds": 0.5}
    assert since.peek({"hits": 4, "seconds": 3.0}) == {"hits": 1, "seconds": 1.0}
    assert since.take({"hits": 10, "seconds": 4.0}) == {"hits": 7, "seconds": 2.0}


def test_misses_are_counted_by_layer(bench):
    client = bench.attach(0)
    bench.has_read(client, 0, [1, 2])
    bench.has_read(client, 1, [3])
    counters = bench.cache.counters
    assert counters.layer_misses == {0: 2, 1: 1}
    assert counters.misses == 3


def test_tokens_are_counted_over_clients_present_and_gone(bench):
    client, other = bench.attach(0), bench.attach(1)
    client.area.count_tokens(5)
    other.area.count_tokens(7)
    assert token_count(bench.cache) == 12
    bench.cache.detach(0)
    assert token_count(bench.cache) == 12


def test_the_memory_taken_is_the_kernels_word():
    status = Path("/proc/self/status").read_text()
    vm_rss_bytes = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024
    assert rss_bytes() == pytest.approx(vm_rss_bytes, rel=0.05)
