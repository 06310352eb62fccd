"""Every engine under one reader, on a disk in good health: the same bytes as plain reads."""

import mmap
import os
import random
import select
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamd.readers.direct import open_file
from streamd.readers.engine import address_of
from streamd.readers.latency import LatencyHistogram
from streamd.readers.probe import make_engine
from streamd.readers.reader import Reader
from streamd.readers.slab_read import Extent, Priority, SlabRead

PIECE = 64 << 10
END = 9 * PIECE + 777

RANGES = {
    "first byte": (0, 1),
    "one byte across a block": (511, 2),
    "across a page": (4095, 4098),
    "an aligned page": (4096, 4096),
    "unaligned at both ends": (12_345, 23_456),
    "exactly one piece": (PIECE, PIECE),
    "one byte more than a piece": (0, PIECE + 1),
    "many pieces, unaligned": (777, 5 * PIECE),
    "last byte": (END - 1, 1),
    "the ragged end": (END - 777, 777),
    "into the ragged end": (END - PIECE, PIECE),
    "the whole file": (0, END),
}


def test_the_ranges_suit_the_bench(bench, file):
    with bench(file) as b:
        assert (b.piece_bytes, file.size_bytes) == (PIECE, END)


@pytest.mark.parametrize("priority", Priority)
def test_the_drive_is_idle_while_nothing_is_read_for_clients(bench, file, priority):
    """1 s before a read of 4 s, and 2 s after it; what fills an idle tier takes nobody's time."""
    now_s = 50.0
    with bench(file, clock=lambda: now_s, held={0}) as b:
        now_s += 1.0
        b.reader.submit(b.slab("slab", (0, PIECE)), priority)
        now_s += 4.0
        busy_s = 0.0 if priority == Priority.BACKFILL else 4.0
        assert b.reader.idle_s == 5.0 - busy_s
        b.engine.release()
        b.finish(1)
        now_s += 2.0
        assert b.reader.idle_s == 7.0 - busy_s


def test_the_drive_is_not_idle_while_a_hint_waits_behind_what_fills_an_idle_tier(bench, file):
    now_s = 0.0
    with bench(file, clock=lambda: now_s, held=set(range(8))) as b:
        for number in range(b.depth):
            b.reader.submit(b.slab(number, (0, PIECE)), Priority.BACKFILL)
        now_s += 1.0
        assert b.reader.idle_s == 1.0
        b.reader.submit(b.slab("hinted", (0, PIECE)), Priority.PREFETCH)
        now_s += 1.0
        assert b.reader.idle_s == 1.0
        assert b.reader.cancel("hinted"), "it had not begun"
        now_s += 1.0
        assert b.reader.idle_s == 2.0
        b.engine.release()


@pytest.mark.parametrize("case", RANGES)
def test_a_range_is_read_as_it_is_in_the_file(bench, file, content, case):
    with bench(file) as b:
        slab = b.slab("slab", RANGES[case])
        completion = b.read(slab)["slab"]
        b.check(slab, content)
        stats = b.reader.stats()
    assert completion.error is None
    assert completion.bytes_read == stats.bytes_read >= RANGES[case][1]
    assert completion.latency_ms > 0
    assert stats.useful_bytes == RANGES[case][1]
    assert (stats.in_flight_bytes, stats.in_flight_reads, stats.waiting_reads) == (0, 0, 0)
    assert (stats.retries, stats.failed_slabs) == (0, 0)
    assert 0 < stats.latency_ms_p50 <= stats.latency_ms_p99


def test_empty_extents_are_skipped(bench, file, content):
    with bench(file) as b:
        slab = b.slab("slab", (5, 0), (END, 0), (100, 200))
        assert b.read(slab)["slab"].error is None
        b.check(slab, content)
        assert b.reader.stats().reads == 1


def test_many_more_slabs_than_the_depth_in_the_order_they_came(bench, file, content):
    rng = random.Random(1)
    starts = [rng.randrange(END - 9000) for _ in range(200)]
    with bench(file) as b:
        slabs = [b.slab(key, (start, 9000)) for key, start in enumerate(starts)]
        done = b.read(*slabs)
        for slab in slabs:
            assert done[slab.key].error is None
            b.check(slab, content)
        assert b.engine.in_flight_peak == b.depth
        align = b.reader.align_bytes
        assert [offset for offset, _, _ in b.engine.seen] == [s // align * align for s in starts]


EXTENTS = st.integers(0, END - 1).flatmap(
    lambda offset: st.tuples(st.just(offset), st.integers(1, min(END - offset, 150_000)))
)


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # they hold no state
)
@given(
    ranges=st.lists(st.lists(EXTENTS, min_size=1, max_size=3), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
)
def test_random_slabs_ending_out_of_order(bench, file, content, ranges, seed):
    with bench(file, shuffle=random.Random(seed)) as b:
        slabs = [b.slab(key, *of_slab) for key, of_slab in enumerate(ranges)]
        done = b.read(*slabs)
        for slab in slabs:
            assert done[slab.key].error is None
            b.check(slab, content)


def test_two_files_share_the_larger_alignment(engine_name, bench, file, content):
    coarse = open_file(file.path, align_of=lambda fd: 8192)
    try:
        with bench([file, coarse]) as b:
            slabs = [b.slab(index, (777, 5000), file_index=index) for index in range(2)]
            done = b.read(*slabs)
            for slab in slabs:
                assert done[slab.key].error is None
                b.check(slab, content)
            if coarse.direct:
                assert b.reader.align_bytes == 8192
    finally:
        coarse.close()


def test_direct_reads_come_from_the_disk(bench, file, content):
    counters = Path("/proc/self/io")
    if not file.direct or not counters.exists():
        pytest.skip("no direct I/O or no counters here")

    def disk_bytes() -> int:
        return int(counters.read_text().split("read_bytes:")[1].split()[0])

    assert file.path.read_bytes() == content  # in the page cache now
    with bench(file) as b:
        slab = b.slab("slab", (777, 5 * PIECE))
        before = disk_bytes()
        b.read(slab)
        assert disk_bytes() - before >= b.reader.stats().bytes_read > 5 * PIECE


def test_buffered_files_are_read_the_same_way(bench, file, content):
    buffered = open_file(file.path, align_of=lambda fd: 0)
    try:
        buffered.forget(0, END)  # what writing it and other tests have left in the page cache
        with bench(buffered) as b:
            slab = b.slab("slab", (777, 5 * PIECE), (END - 777, 777))
            assert b.read(slab)["slab"].error is None
            b.check(slab, content)
        if file.direct:  # on a disk; memory filesystems keep what they have
            with pytest.raises(BlockingIOError):  # the page cache has not kept it
                os.preadv(buffered.fd, [bytearray(1)], 2 * PIECE, os.RWF_NOWAIT)
    finally:
        buffered.close()


def test_the_queue_states_its_room(bench, file):
    with bench(file) as b:
        room = b.reader.room
        b.reader.submit(b.slab("one", (0, 10)))
        b.reader.submit(b.slab("two", (0, 10)))
        assert b.reader.room == room - 2
        b.finish(2)
        assert b.reader.room == room


def test_the_queue_states_how_many_reads_wait(bench, file):
    with bench(file) as b:
        b.reader.submit(b.slab("whole", (0, END)))
        in_flight_count = b.reader.stats().in_flight_reads
        assert b.reader.waiting_reads == 10 - in_flight_count > 0
        b.finish(1)
        assert b.reader.waiting_reads == 0


def test_pieces_keep_an_alignment_that_does_not_divide_them(engine_name, file, content):
    align_bytes = 24 << 10
    engine = make_engine(engine_name, 4)
    reader = Reader(engine, [file], 4, align_bytes=align_bytes, piece_bytes=PIECE)
    whole = memoryview(mmap.mmap(-1, 8 * align_bytes))
    start = -address_of(whole) % align_bytes
    target = whole[start : start + 5 * align_bytes]
    reader.submit(SlabRead("slab", (Extent(0, align_bytes, 3 * align_bytes, target),)))
    bell = select.poll()
    bell.register(reader.fileno(), select.POLLIN)
    completions = []
    while not completions:
        assert bell.poll(10_000)
        completions = reader.poll()
    assert completions[0].error is None
    assert reader.stats().reads == 2  # of 48 and 24 KiB
    assert target[: 3 * align_bytes] == content[align_bytes : 4 * align_bytes]
    reader.close()


def test_latency_percentiles_are_close_to_the_exact_ones():
    latencies = np.random.default_rng(3).lognormal(mean=0.5, sigma=1.5, size=5000)
    histogram = LatencyHistogram()
    assert histogram.percentile_ms(50) == 0
    for latency in latencies:
        histogram.add(latency)
    for percent in (1, 50, 99, 100):
        exact = np.percentile(latencies, percent, method="inverted_cdf")
        assert exact <= histogram.percentile_ms(percent) <= exact * 1.1
    histogram.add(1e9)
    assert histogram.percentile_ms(100) < 1e6
