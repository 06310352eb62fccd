"""The contract of an engine by itself."""

import errno
import mmap
import os
import select
import time

import pytest

from streamd.readers.probe import FALLBACK, make_engine

DEPTH = 2
PATIENCE_MS = 10_000


def bell_of(engine) -> select.poll:
    bell = select.poll()
    bell.register(engine.fileno(), select.POLLIN)
    return bell


def test_an_engine_takes_no_more_than_its_depth(engine_name, file):
    engine = make_engine(engine_name, DEPTH)
    buffers = [memoryview(mmap.mmap(-1, 4096)) for _ in range(DEPTH + 1)]
    for token in range(DEPTH):
        engine.submit(token, file.fd, buffers[token], 0)
    with pytest.raises(AssertionError):
        engine.submit(DEPTH, file.fd, buffers[DEPTH], 0)
    engine.flush()
    bell, ended = bell_of(engine), []
    while len(ended) < DEPTH and bell.poll(PATIENCE_MS):
        ended += engine.reap()
    assert sorted(ended) == [(token, 4096) for token in range(DEPTH)]
    assert engine.reap() == []
    assert bell.poll(0) == []
    engine.close()


def test_a_read_of_a_bad_descriptor_ends_with_its_errno(engine_name):
    engine = make_engine(engine_name, DEPTH)
    engine.submit(5, 9999, memoryview(bytearray(512)), 0)
    engine.flush()
    assert bell_of(engine).poll(PATIENCE_MS)
    assert engine.reap() == [(5, -errno.EBADF)]
    engine.close()


def test_a_ring_never_waits_for_a_read(engine_name):
    """A read of an empty pipe does not end: nothing that the event loop calls may hang on it."""
    if engine_name == FALLBACK:
        pytest.skip("its threads do the waiting, and pread wants a seekable file")
    engine = make_engine(engine_name, DEPTH)
    pipe_out, pipe_in = os.pipe()
    buffer = bytearray(4)
    begun_s = time.monotonic()
    engine.submit(7, pipe_out, memoryview(buffer), 0)
    engine.flush()
    assert engine.reap() == []
    assert time.monotonic() - begun_s < 1.0
    bell = bell_of(engine)
    assert bell.poll(20) == []
    os.write(pipe_in, b"late")
    assert bell.poll(PATIENCE_MS)
    assert engine.reap() == [(7, 4)]
    assert buffer == b"late"
    engine.close()
    os.close(pipe_out)
    os.close(pipe_in)
