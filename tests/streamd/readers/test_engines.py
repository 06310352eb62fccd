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


def read_once(engine, fd: int, buffer: memoryview, offset: int) -> list[tuple[int, int]]:
    engine.submit(0, fd, buffer, offset)
    engine.flush()
    assert bell_of(engine).poll(PATIENCE_MS)
    return engine.reap()


def test_memory_is_used_again_for_reads_of_other_lengths(engine_name, file, content):
    engine = make_engine(engine_name, DEPTH)
    memory = memoryview(mmap.mmap(-1, 8192))
    for size in (8192, 512, 4096, 8192):
        memory[:] = bytes(8192)
        assert read_once(engine, file.fd, memory[:size], 512) == [(0, size)]
        assert memory == content[512 : 512 + size] + bytes(8192 - size)
    engine.close()


def test_more_buffers_than_an_engine_remembers(engine_name, file, content, monkeypatch):
    if engine_name == "liburing":
        monkeypatch.setattr("streamd.readers.liburing_engine.IOVECS_MAX", 2)
    engine = make_engine(engine_name, DEPTH)
    memory = memoryview(mmap.mmap(-1, 5 * 4096))
    for index in [*range(5), *range(5)]:
        part = memory[index * 4096 : (index + 1) * 4096]
        assert read_once(engine, file.fd, part, index * 512) == [(0, 4096)]
        assert part == content[index * 512 : index * 512 + 4096]
    engine.close()


def test_a_read_of_a_bad_descriptor_ends_with_its_errno(engine_name):
    engine = make_engine(engine_name, DEPTH)
    assert read_once(engine, 9999, memoryview(bytearray(512)), 0) == [(0, -errno.EBADF)]
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
    with pytest.raises(BufferError):
        buffer.append(0)  # it is held in its place while the kernel may write to it
    bell = bell_of(engine)
    assert bell.poll(20) == []
    os.write(pipe_in, b"late")
    assert bell.poll(PATIENCE_MS)
    assert engine.reap() == [(7, 4)]
    assert buffer == b"late"
    engine.close()
    os.close(pipe_out)
    os.close(pipe_in)
