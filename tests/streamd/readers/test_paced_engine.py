"""The stand-in for a drive: nothing ends before that drive would have ended it."""

import os
import select
import time

import pytest

from streamd.readers.paced_engine import PacedEngine
from streamd.readers.probe import make_engine

MIB = 1 << 20


class InstantEngine:
    """Every read ends at once; `result` bytes of it."""

    name, depth = "instant", 64

    def __init__(self):
        self._ended = []
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.registered = []

    def fileno(self):
        return self._bell

    def register(self, buffer):
        self.registered.append(buffer)

    def submit(self, token, fd, buffer, offset):
        self._ended.append((token, buffer.nbytes))

    def flush(self):
        os.eventfd_write(self._bell, 1)

    def reap(self):
        ended, self._ended = self._ended, []
        if ended:
            os.eventfd_read(self._bell)
        return ended

    def close(self):
        os.close(self._bell)


@pytest.fixture
def clock():
    class Clock:
        now_s = 100.0

        def __call__(self):
            return self.now_s

    return Clock()


@pytest.fixture
def paced(clock):
    engine = PacedEngine(InstantEngine(), bytes_per_s=1000 * MIB, latency_s=0.002, clock=clock)
    yield engine
    engine.close()


def _submit(engine, *tokens):
    for token in tokens:
        engine.submit(token, 0, memoryview(bytearray(MIB)), 0)
    engine.flush()


def test_one_read_takes_the_latency_and_its_bytes(paced, clock):
    _submit(paced, 7)
    assert paced.reap() == []
    clock.now_s += 0.0029
    assert paced.reap() == []
    clock.now_s += 0.0002
    assert paced.reap() == [(7, MIB)]


def test_reads_share_the_line_and_their_latencies_overlap(paced, clock):
    _submit(paced, *range(10))
    paced.reap()
    ended = []
    for _ in range(13):
        clock.now_s += 0.001
        ended.append(len(paced.reap()))
    assert sum(ended) == 10
    assert ended[:2] == [0, 0]
    assert max(ended[3:]) <= 2


def test_it_says_what_it_is(paced):
    assert paced.name == "paced 1.04858 GB/s over instant"


def test_its_descriptor_wakes_a_poll_in_time():
    engine = PacedEngine(InstantEngine(), bytes_per_s=50 * MIB, latency_s=0.0)
    bell = select.poll()
    bell.register(engine.fileno(), select.POLLIN)
    started_s = time.monotonic()
    _submit(engine, 1, 2)
    ended = []
    while len(ended) < 2:
        assert bell.poll(5000), "nobody woke us"
        ended += engine.reap()
    assert time.monotonic() - started_s >= 0.04
    assert not bell.poll(0)
    engine.close()


def test_bytes_are_the_inner_engines(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(os.urandom(MIB))
    engine = PacedEngine(make_engine("pread", 4), bytes_per_s=1e9)
    buffer = memoryview(bytearray(MIB))
    fd = os.open(path, os.O_RDONLY)
    engine.submit(3, fd, buffer, 0)
    engine.flush()
    bell = select.poll()
    bell.register(engine.fileno(), select.POLLIN)
    ended = []
    while not ended:
        assert bell.poll(5000)
        ended = engine.reap()
    assert ended == [(3, MIB)]
    assert bytes(buffer) == path.read_bytes()
    os.close(fd)
    engine.close()
