"""Every engine under one reader: the same bytes as plain reads, whatever the disk does.

The arena between the targets is filled with a pattern, so a read that strays is seen.
"""

import errno
import mmap
import os
import random
import select
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ModelChanged, ReadFailed
from streamd.readers.direct import OpenFile, open_file
from streamd.readers.engine import Engine, address_of
from streamd.readers.latency import LatencyHistogram
from streamd.readers.probe import ENGINES, make_engine, try_in_child
from streamd.readers.reader import TRIES_MAX, Reader
from streamd.readers.slab_read import Completion, Extent, SlabRead

PIECE_BYTES = 64 << 10
FILE_BYTES = 9 * PIECE_BYTES + 777
ARENA_BYTES = 8 << 20
CANARY = 0xA5
DEPTH = 4
PATIENCE_S = 10.0


class FaultyEngine:
    """Passes reads on to a real engine, but for the faults asked for.

    `faults[n]` is the end of the n-th read: -errno or 0 come at once; a positive number cuts the
    read short, and what lies beyond in its buffer is spoilt. Reads in `held` end at `release`.
    With `shuffle`, reads end in random order, one at a time.
    """

    def __init__(self, inner: Engine, faults=(), held=(), shuffle: random.Random | None = None):
        self.inner, self.faults, self.held = inner, dict(faults), set(held)
        self.shuffle = shuffle
        self.name, self.depth = inner.name, inner.depth
        self.seen: list[tuple[int, int, int]] = []  # offset, length, address of each read
        self.in_flight_peak = 0
        self._reads: dict[int, tuple[int, memoryview]] = {}  # token: ordinal, buffer
        self._ended: list[tuple[int, int]] = []
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._bell, select.EPOLLIN)
        self._epoll.register(inner.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def submit(self, token: int, fd: int, buffer: memoryview, offset: int) -> None:
        ordinal = len(self.seen)
        self.seen.append((offset, buffer.nbytes, address_of(buffer)))
        self._reads[token] = (ordinal, buffer)
        self.in_flight_peak = max(self.in_flight_peak, len(self._reads))
        fault = self.faults.get(ordinal)
        if fault is None or fault > 0:
            self.inner.submit(token, fd, buffer, offset)
        else:
            self._end(token, fault)

    def flush(self) -> None:
        self.inner.flush()

    def reap(self) -> list[tuple[int, int]]:
        for token, result in self.inner.reap():
            ordinal, buffer = self._reads[token]
            cut = self.faults.get(ordinal)
            if cut is not None and cut < result:
                buffer[cut:] = bytes([CANARY]) * (buffer.nbytes - cut)
                result = cut
            self._end(token, result)
        ready = [end for end in self._ended if self._reads[end[0]][0] not in self.held]
        if self.shuffle and ready:
            ready = [self.shuffle.choice(ready)]
        self._ended = [end for end in self._ended if end not in ready]
        if not any(self._reads[token][0] not in self.held for token, _ in self._ended):
            self._silence()
        for token, _ in ready:
            del self._reads[token]
        return ready

    def release(self) -> None:
        self.held.clear()
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        self.inner.close()
        self._epoll.close()
        os.close(self._bell)

    def _end(self, token: int, result: int) -> None:
        self._ended.append((token, result))
        os.eventfd_write(self._bell, 1)

    def _silence(self) -> None:
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return


class Bench:
    """A reader over one file and an arena to read into."""

    def __init__(self, engine_name: str, file: OpenFile, *, depth: int = DEPTH, **faults):
        self.file = file
        self.engine = FaultyEngine(make_engine(engine_name, depth), **faults)
        self.reader = Reader(self.engine, [file], depth, piece_bytes=PIECE_BYTES)
        self.arena = mmap.mmap(-1, ARENA_BYTES)
        self.arena[:] = bytes([CANARY]) * ARENA_BYTES
        self._used_bytes = 0
        self._views: list[memoryview] = []

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *exc_info) -> None:
        assert self.reader.close() or self.engine.held
        for view in self._views:
            view.release()
        self.arena.close()  # raises if an engine still exports it

    def extent(self, offset: int, length: int) -> Extent:
        """With a target of exactly the stated capacity, and a canary of one page after it."""
        align = self.reader.align_bytes
        capacity = -(-(align + length) // align) * align
        view = memoryview(self.arena)
        target = view[self._used_bytes : self._used_bytes + capacity]
        view.release()
        self._views.append(target)
        self._used_bytes += -(-capacity // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE
        return Extent(0, offset, length, target)

    def slab(self, key, *ranges: tuple[int, int]) -> SlabRead:
        return SlabRead(key, tuple(self.extent(offset, length) for offset, length in ranges))

    def poll(self, timeout_s: float) -> list[Completion]:
        bell = select.poll()
        bell.register(self.reader.fileno(), select.POLLIN)
        return self.reader.poll() if bell.poll(timeout_s * 1000) else []

    def finish(self, slab_count: int) -> dict:
        """Waits for that many completions; none may come twice or later on."""
        done: dict = {}
        deadline_s = time.monotonic() + PATIENCE_S
        while len(done) < slab_count:
            assert time.monotonic() < deadline_s, f"only {sorted(done)} completed"
            for completion in self.poll(1.0):
                assert completion.key not in done
                done[completion.key] = completion
        assert self.poll(0.02) == []
        return done

    def check(self, slab: SlabRead, expected: bytes) -> None:
        """The payloads are right and nothing but the widened ranges has been written to."""
        align = self.reader.align_bytes
        for extent in slab.extents:
            delta = extent.offset % align
            payload = extent.target[delta : delta + extent.length]
            assert payload == expected[extent.offset : extent.offset + extent.length]
            widened = -(-(delta + extent.length) // align) * align if extent.length else 0
            begin = address_of(extent.target) - address_of(self._views[0])
            after = begin + extent.target.nbytes
            assert set(extent.target[widened:]) <= {CANARY}
            assert set(self.arena[after : after + mmap.PAGESIZE]) == {CANARY}


@cache
def refusal(engine_name: str) -> str:
    return "" if engine_name == "pread" else try_in_child(engine_name, DEPTH)


@pytest.fixture(scope="module")
def content() -> bytes:
    return random.Random(7).randbytes(FILE_BYTES)


@pytest.fixture(params=ENGINES)
def engine_name(request) -> str:
    if reason := refusal(request.param):
        pytest.skip(reason)
    before = set(os.listdir("/proc/self/fd"))
    yield request.param
    assert set(os.listdir("/proc/self/fd")) == before, "descriptors leaked"


@pytest.fixture
def file(engine_name, content, tmp_path: Path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    opened = open_file(path)
    yield opened
    opened.close()


END = FILE_BYTES
RANGES = {
    "first byte": (0, 1),
    "one byte across a block": (511, 2),
    "across a page": (4095, 4098),
    "an aligned page": (4096, 4096),
    "unaligned at both ends": (12_345, 23_456),
    "exactly one piece": (PIECE_BYTES, PIECE_BYTES),
    "one byte more than a piece": (0, PIECE_BYTES + 1),
    "many pieces, unaligned": (777, 5 * PIECE_BYTES),
    "last byte": (END - 1, 1),
    "the ragged end": (END - 777, 777),
    "into the ragged end": (END - PIECE_BYTES, PIECE_BYTES),
    "the whole file": (0, END),
}


@pytest.mark.parametrize("case", RANGES)
def test_a_range_is_read_as_it_is_in_the_file(engine_name, file, content, case):
    with Bench(engine_name, file) as bench:
        slab = bench.slab("slab", RANGES[case])
        bench.reader.submit(slab)
        completion = bench.finish(1)["slab"]
        bench.check(slab, content)
        stats = bench.reader.stats()
    assert completion.error is None
    assert completion.bytes_read == stats.bytes_read >= RANGES[case][1]
    assert completion.latency_ms > 0
    assert stats.useful_bytes == RANGES[case][1]
    assert (stats.in_flight_bytes, stats.in_flight_reads, stats.waiting_reads) == (0, 0, 0)
    assert 0 < stats.latency_ms_p50 <= stats.latency_ms_p99


def test_empty_extents_are_skipped(engine_name, file, content):
    with Bench(engine_name, file) as bench:
        slab = bench.slab("slab", (5, 0), (END, 0), (100, 200))
        bench.reader.submit(slab)
        assert bench.finish(1)["slab"].error is None
        bench.check(slab, content)
        assert bench.reader.stats().reads == 1


def test_many_more_slabs_than_the_depth_in_the_order_they_came(engine_name, file, content):
    rng = random.Random(1)
    starts = [rng.randrange(END - 9000) for _ in range(200)]
    with Bench(engine_name, file) as bench:
        slabs = [bench.slab(key, (start, 9000)) for key, start in enumerate(starts)]
        for slab in slabs:
            bench.reader.submit(slab)
        done = bench.finish(len(slabs))
        for slab in slabs:
            assert done[slab.key].error is None
            bench.check(slab, content)
        assert bench.engine.in_flight_peak == DEPTH
        align = bench.reader.align_bytes
        assert [offset for offset, _, _ in bench.engine.seen] == [
            s // align * align for s in starts
        ]


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_random_slabs_out_of_order(engine_name_cached, data):
    extent = st.integers(0, END - 1).flatmap(
        lambda offset: st.tuples(st.just(offset), st.integers(1, min(END - offset, 150_000)))
    )
    slabs = data.draw(st.lists(st.lists(extent, min_size=1, max_size=3), min_size=1, max_size=6))
    name, file, content = engine_name_cached
    shuffle = random.Random(data.draw(st.integers(0, 2**32)))
    with Bench(name, file, shuffle=shuffle) as bench:
        requests = [bench.slab(key, *ranges) for key, ranges in enumerate(slabs)]
        for request in requests:
            bench.reader.submit(request)
        done = bench.finish(len(requests))
        for request in requests:
            assert done[request.key].error is None
            bench.check(request, content)


@pytest.fixture(scope="module", params=ENGINES)
def engine_name_cached(request, content, tmp_path_factory):
    if reason := refusal(request.param):
        pytest.skip(reason)
    path = tmp_path_factory.mktemp("random") / "model.gguf"
    path.write_bytes(content)
    opened = open_file(path)
    yield request.param, opened, content
    opened.close()


@pytest.mark.parametrize("cut", [0, 100, 512, 4096, 5000, PIECE_BYTES - 1])
def test_short_reads_are_continued_aligned(engine_name, file, content, cut):
    faults = {0: cut, 3: cut, DEPTH + 2: cut}
    with Bench(engine_name, file, faults=faults) as bench:
        slab = bench.slab("slab", (777, 5 * PIECE_BYTES))
        bench.reader.submit(slab)
        assert bench.finish(1)["slab"].error is None
        bench.check(slab, content)
        assert bench.reader.stats().retries == len(faults)
        align = bench.reader.align_bytes
        for read in bench.engine.seen:
            assert [number % align for number in read] == [0, 0, 0]


@pytest.mark.parametrize("fault", [errno.EAGAIN, errno.EINTR])
def test_what_is_no_error_is_tried_again(engine_name, file, content, fault):
    with Bench(engine_name, file, faults={0: -fault, 1: -fault, 5: -fault}) as bench:
        slab = bench.slab("slab", (0, 4 * PIECE_BYTES))
        bench.reader.submit(slab)
        assert bench.finish(1)["slab"].error is None
        bench.check(slab, content)
        assert bench.reader.stats().retries == 3


@pytest.mark.parametrize(("result", "word"), [(-errno.EAGAIN, "unavailable"), (0, "short reads")])
def test_what_never_gets_on_fails_after_a_while(engine_name, file, result, word):
    faults = dict.fromkeys(range(1000), result)
    with Bench(engine_name, file, faults=faults) as bench:
        bench.reader.submit(bench.slab("slab", (4096, 100)))
        error = bench.finish(1)["slab"].error
        assert isinstance(error, ReadFailed)
        assert word in error.message
        assert len(bench.engine.seen) == TRIES_MAX


@pytest.mark.parametrize("fault", [errno.EIO, errno.ENODATA, errno.ESTALE, errno.EINVAL])
def test_an_error_names_file_and_place_and_hurts_no_other_slab(engine_name, file, content, fault):
    with Bench(engine_name, file, faults={1: -fault}) as bench:
        slabs = [bench.slab(key, (key * 8192 + 5, 5000)) for key in range(6)]
        for slab in slabs:
            bench.reader.submit(slab)
        done = bench.finish(len(slabs))
        error = done.pop(1).error
        assert isinstance(error, ReadFailed)
        for word in (str(file.path), "byte 8192", os.strerror(fault), str(fault)):
            assert word in error.message
        for key, completion in done.items():
            assert completion.error is None
            bench.check(slabs[key], content)
        assert bench.reader.stats().failed_slabs == 1


def test_a_failed_slab_completes_only_after_its_last_piece_has_landed(engine_name, file):
    with Bench(engine_name, file, faults={0: -errno.EIO}, held={2}) as bench:
        bench.reader.submit(bench.slab("slab", (0, 8 * PIECE_BYTES)))
        deadline_s = time.monotonic() + PATIENCE_S
        while bench.reader.stats().in_flight_reads > 1:
            assert time.monotonic() < deadline_s
            assert bench.poll(1.0) == []
        assert bench.poll(0.02) == []
        bench.engine.release()
        assert bench.finish(1)["slab"].error is not None
        assert len(bench.engine.seen) == DEPTH, "the rest is not read in vain"


def test_a_file_that_shrank_is_named(engine_name, file):
    with Bench(engine_name, file) as bench:
        os.truncate(file.path, 3 * PIECE_BYTES + 100)
        bench.reader.submit(bench.slab("kept", (0, PIECE_BYTES)))
        bench.reader.submit(bench.slab("cut", (3 * PIECE_BYTES - 50, 1000)))
        bench.reader.submit(bench.slab("gone", (5 * PIECE_BYTES, 1000)))
        done = bench.finish(3)
        assert done["kept"].error is None
        for key in ("cut", "gone"):
            error = done[key].error
            assert isinstance(error, ModelChanged)
            assert str(file.path) in error.message
            assert str(FILE_BYTES) in error.message
            assert error.remedy


def test_cancel_forgets_what_was_not_begun(engine_name, file, content):
    with Bench(engine_name, file, held=range(DEPTH)) as bench:
        first = bench.slab("first", (0, DEPTH * PIECE_BYTES))
        bench.reader.submit(first)
        bench.reader.submit(bench.slab("second", (0, 3 * PIECE_BYTES)))
        third = bench.slab("third", (99, 999))
        bench.reader.submit(third)
        assert bench.reader.cancel("second") is True
        assert bench.reader.cancel("first") is False  # all of it is in flight already
        bench.engine.release()
        done = bench.finish(2)
        assert [done[key].error for key in ("first", "third")] == [None, None]
        bench.check(first, content)
        bench.check(third, content)


def test_cancel_of_half_a_slab_completes_it_with_an_error(engine_name, file):
    with Bench(engine_name, file, held=range(DEPTH)) as bench:
        bench.reader.submit(bench.slab("slab", (0, 8 * PIECE_BYTES)))
        assert bench.reader.cancel("slab") is False
        assert bench.reader.stats().waiting_reads == 0
        assert bench.poll(0.02) == []
        bench.engine.release()
        error = bench.finish(1)["slab"].error
        assert isinstance(error, ReadFailed)
        assert "cancelled" in error.message
        assert len(bench.engine.seen) == DEPTH


def test_the_queue_states_its_room(engine_name, file):
    with Bench(engine_name, file, held=range(DEPTH)) as bench:
        room = bench.reader.room
        bench.reader.submit(bench.slab("one", (0, 10)))
        bench.reader.submit(bench.slab("two", (0, 10)))
        assert bench.reader.room == room - 2
        bench.engine.release()
        bench.finish(2)
        assert bench.reader.room == room


def test_close_waits_for_what_is_in_flight(engine_name, file):
    with Bench(engine_name, file) as bench:
        bench.reader.submit(bench.slab("slab", (0, FILE_BYTES)))
    # Bench's exit asserts that close() saw everything land.
    assert len(bench.engine.seen) == DEPTH


def test_close_does_not_wait_for_ever(engine_name, file):
    bench = Bench(engine_name, file, held={0})
    bench.reader.submit(bench.slab("slab", (0, 100)))
    begun_s = time.monotonic()
    assert bench.reader.close(patience_s=0.1) is False
    assert time.monotonic() - begun_s < 2.0


def test_direct_reads_come_from_the_disk(engine_name, file, content):
    counters = Path("/proc/self/io")
    if not file.direct or not counters.exists():
        pytest.skip("no direct I/O or no counters here")

    def disk_bytes() -> int:
        return int(counters.read_text().split("read_bytes:")[1].split()[0])

    assert file.path.read_bytes() == content  # in the page cache now
    with Bench(engine_name, file) as bench:
        before = disk_bytes()
        bench.reader.submit(bench.slab("slab", (777, 5 * PIECE_BYTES)))
        bench.finish(1)
        assert disk_bytes() - before >= bench.reader.stats().bytes_read > 5 * PIECE_BYTES


def test_buffered_files_are_read_the_same_way(engine_name, file, content):
    buffered = open_file(file.path, align_of=lambda fd: 0)
    try:
        with Bench(engine_name, buffered) as bench:
            slab = bench.slab("slab", (777, 5 * PIECE_BYTES), (END - 777, 777))
            bench.reader.submit(slab)
            assert bench.finish(1)["slab"].error is None
            bench.check(slab, content)
    finally:
        buffered.close()


@pytest.mark.parametrize("ring_name", [name for name in ENGINES if name != "pread"])
def test_a_ring_never_waits_for_a_read(ring_name):
    """A read of an empty pipe does not end: nothing that the event loop calls may hang on it."""
    if reason := refusal(ring_name):
        pytest.skip(reason)
    engine = make_engine(ring_name, DEPTH)
    pipe_out, pipe_in = os.pipe()
    buffer = bytearray(4)
    begun_s = time.monotonic()
    engine.submit(7, pipe_out, memoryview(buffer), 0)
    engine.flush()
    assert engine.reap() == []
    assert time.monotonic() - begun_s < 1.0
    bell = select.poll()
    bell.register(engine.fileno(), select.POLLIN)
    assert bell.poll(20) == []
    os.write(pipe_in, b"late")
    assert bell.poll(PATIENCE_S * 1000)
    assert engine.reap() == [(7, 4)]
    assert buffer == b"late"
    engine.close()
    os.close(pipe_out)
    os.close(pipe_in)


def test_an_engine_takes_no_more_than_its_depth(engine_name, file):
    engine = make_engine(engine_name, 2)
    buffers = [memoryview(mmap.mmap(-1, 4096)) for _ in range(3)]
    engine.submit(0, file.fd, buffers[0], 0)
    engine.submit(1, file.fd, buffers[1], 0)
    with pytest.raises(AssertionError):
        engine.submit(2, file.fd, buffers[2], 0)
    engine.flush()
    bell = select.poll()
    bell.register(engine.fileno(), select.POLLIN)
    ended = []
    while len(ended) < 2 and bell.poll(PATIENCE_S * 1000):
        ended += engine.reap()
    assert sorted(ended) == [(0, 4096), (1, 4096)]
    engine.close()


def test_a_read_of_a_bad_descriptor_ends_with_its_errno(engine_name):
    engine = make_engine(engine_name, 2)
    engine.submit(5, 9999, memoryview(bytearray(512)), 0)
    engine.flush()
    bell = select.poll()
    bell.register(engine.fileno(), select.POLLIN)
    assert bell.poll(PATIENCE_S * 1000)
    assert engine.reap() == [(5, -errno.EBADF)]
    engine.close()


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
