"""A reader on a bench: over a real disk and a real engine, with faults put in between.

The arena between the targets is filled with a pattern, so a read that strays is seen.
"""

import gc
import mmap
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from streamd.readers.direct import OpenFile, open_file
from streamd.readers.engine import Engine, address_of
from streamd.readers.probe import ENGINES, make_engine
from streamd.readers.reader import Reader
from streamd.readers.slab_read import Completion, Extent, SlabRead

PIECE_BYTES = 64 << 10
FILE_BYTES = 9 * PIECE_BYTES + 777
ARENA_BYTES = 4 << 20
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
        self.fault_count = 0
        self.closed = False
        self._reads: dict[int, tuple[int, memoryview]] = {}  # token: ordinal, buffer
        self._ended: list[tuple[int, int]] = []
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._bell, select.EPOLLIN)
        self._epoll.register(inner.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def register(self, buffer: memoryview) -> None:
        self.inner.register(buffer)

    def submit(self, token: int, fd: int, buffer: memoryview, offset: int) -> None:
        ordinal = len(self.seen)
        self.seen.append((offset, buffer.nbytes, address_of(buffer)))
        self._reads[token] = (ordinal, buffer)
        self.in_flight_peak = max(self.in_flight_peak, len(self._reads))
        fault = self.faults.get(ordinal)
        if fault is None or fault > 0:
            self.inner.submit(token, fd, buffer, offset)
        else:
            self.fault_count += 1
            self._end(token, fault)

    def flush(self) -> None:
        self.inner.flush()

    def reap(self) -> list[tuple[int, int]]:
        for token, result in self.inner.reap():
            ordinal, buffer = self._reads[token]
            kept = min(result, self.faults.get(ordinal, result))
            if kept < result:
                buffer[kept:] = bytes([CANARY]) * (buffer.nbytes - kept)
                self.fault_count += 1
            self._end(token, kept)
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
        self.closed = True
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
    """A reader over one or more files, and an arena to read into."""

    def __init__(
        self,
        engine_name: str,
        files: OpenFile | list[OpenFile],
        clock: Callable[[], float] = time.monotonic,
        **faults,
    ):
        self.piece_bytes, self.depth = PIECE_BYTES, DEPTH
        files = files if isinstance(files, list) else [files]
        self.engine = FaultyEngine(make_engine(engine_name, DEPTH), **faults)
        self.reader = Reader(self.engine, files, DEPTH, piece_bytes=PIECE_BYTES, clock=clock)
        self.arena = mmap.mmap(-1, ARENA_BYTES)
        self.arena[:] = bytes([CANARY]) * ARENA_BYTES
        self._used_bytes = 0
        self._views: list[memoryview] = []

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *exc_info) -> None:
        if not self.engine.closed:
            self.reader.close()
        if self.reader.stats().in_flight_reads:
            return  # what may still be written to must stay mapped
        for view in self._views:
            view.release()
        self.arena.close()  # raises if an engine still exports it

    def extent(self, offset: int, length: int, file_index: int) -> Extent:
        """With a target of exactly the stated capacity, and a canary of one page after it."""
        align = self.reader.align_bytes
        with memoryview(self.arena) as whole:
            begin = self._used_bytes + -(address_of(whole) + self._used_bytes) % align
            end = begin + -(-(align + length) // align) * align
            target = whole[begin:end]
        self._views.append(target)
        self._used_bytes = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE
        return Extent(file_index, offset, length, target)

    def slab(self, key, *ranges: tuple[int, int], file_index: int = 0) -> SlabRead:
        """Of (offset, length) each."""
        extents = [self.extent(offset, length, file_index) for offset, length in ranges]
        return SlabRead(key, tuple(extents))

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
        assert self.poll(0.005) == []
        return done

    def read(self, *slabs: SlabRead) -> dict:
        for slab in slabs:
            self.reader.submit(slab)
        return self.finish(len(slabs))

    def check(self, slab: SlabRead, expected: bytes) -> None:
        """The payloads are right and nothing but the widened ranges has been written to."""
        align = self.reader.align_bytes
        for extent in slab.extents:
            delta = extent.offset % align
            payload = extent.target[delta : delta + extent.length]
            assert payload == expected[extent.offset : extent.offset + extent.length]
            widened = -(-(delta + extent.length) // align) * align if extent.length else 0
            assert set(extent.target[widened:]) <= {CANARY}
            with memoryview(self.arena) as whole:
                after = address_of(extent.target) + extent.target.nbytes - address_of(whole)
                assert set(whole[after : after + mmap.PAGESIZE]) == {CANARY}


RAW_RINGS = {  # how little it takes to see that a package or the kernel does not go along
    "liburing": "import liburing as u; u.io_uring_queue_init(4, u.Ring(), 0)",
    "uring-api": "import uring_api; uring_api.Ring(4)",
    "pread": "",
}


@cache
def raw_refusal(engine_name: str) -> str:
    """Why the package itself cannot make a ring here; asked without any code of ours."""
    command = [sys.executable, "-c", RAW_RINGS[engine_name]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return f"{engine_name}: exit code {done.returncode} {done.stderr}" if done.returncode else ""


@pytest.fixture(params=ENGINES)
def each_engine(request) -> tuple[str, str]:
    """Every engine's name, and why it cannot work on this machine (empty if it can)."""
    return request.param, raw_refusal(request.param)


@pytest.fixture
def engine_name(each_engine) -> str:
    """Every engine in turn that can work here; the test must close what it opens."""
    name, reason = each_engine
    if reason:
        pytest.skip(reason)
    gc.collect()  # what other tests have left behind is not ours
    before = set(os.listdir("/proc/self/fd"))
    yield name
    assert set(os.listdir("/proc/self/fd")) == before, "descriptors leaked"


@pytest.fixture
def bench(engine_name):
    """`bench(file, faults=..., held=..., shuffle=...)` is a Bench with this engine."""
    return partial(Bench, engine_name)


@pytest.fixture(scope="session")
def content() -> bytes:
    return random.Random(7).randbytes(FILE_BYTES)


@pytest.fixture(scope="session")
def model_path(content, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("readers") / "model.gguf"
    path.write_bytes(content)
    with path.open("rb") as written:
        os.fsync(written.fileno())
    return path


@pytest.fixture
def file(engine_name, model_path):
    opened = open_file(model_path)
    yield opened
    opened.close()
