"""Reads into memory that the ring knows beforehand, and into memory it would not take."""

import errno
import mmap
import os
import select

import pytest

from streamd.readers.engine import address_of
from streamd.readers.probe import make_engine, try_in_child
from streamd.readers.registered_buffers import RegisteredBuffers

PAGE = 4096


@pytest.fixture
def engine():
    if reason := try_in_child("liburing", 8):
        pytest.skip(f"no ring here: {reason}")
    engine = make_engine("liburing", 8)
    if engine._registered is None:
        pytest.skip("this kernel has no vectored reads into registered buffers")
    yield engine
    engine.close()


def _read(engine, fd, buffer, offset):
    engine.submit(1, fd, buffer, offset)
    engine.flush()
    bell = select.poll()
    bell.register(engine.fileno(), select.POLLIN)
    assert bell.poll(5000)
    return engine.reap()


def test_parts_of_a_registered_buffer_get_the_right_bytes(engine, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(os.urandom(16 * PAGE))
    arena = mmap.mmap(-1, 32 * PAGE)
    whole = memoryview(arena)
    engine.register(whole[8 * PAGE : 24 * PAGE])
    assert engine._registered.index_of(address_of(whole[8 * PAGE :]), PAGE) == 0
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    for first, count in ((8, 4), (15, 9), (23, 1)):
        target = whole[first * PAGE : (first + count) * PAGE]
        assert _read(engine, fd, target, PAGE) == [(1, count * PAGE)]
        assert bytes(target) == path.read_bytes()[PAGE : (count + 1) * PAGE]
    outside = whole[: 4 * PAGE]
    assert _read(engine, fd, outside, 0) == [(1, 4 * PAGE)]
    assert bytes(outside) == path.read_bytes()[: 4 * PAGE]
    os.close(fd)


def test_ranges_are_found_by_what_they_cover(engine):
    arena = mmap.mmap(-1, 8 * PAGE)
    whole = memoryview(arena)
    table = engine._registered
    assert table.add(whole[4 * PAGE : 6 * PAGE])
    assert table.add(whole[: 2 * PAGE])
    at = address_of(whole)
    assert table.index_of(at + 4 * PAGE, 2 * PAGE) == 0
    assert table.index_of(at + PAGE, PAGE) == 1
    assert table.index_of(at + PAGE, 2 * PAGE) is None
    assert table.index_of(at + 3 * PAGE, PAGE) is None
    assert table.index_of(at - PAGE, PAGE) is None


def test_memory_that_may_not_be_pinned_is_read_into_all_the_same(engine, tmp_path, monkeypatch):
    path = tmp_path / "data"
    path.write_bytes(os.urandom(PAGE))

    def refuse(_table, _opcode, _argument):
        raise OSError(errno.ENOMEM, "beyond RLIMIT_MEMLOCK")

    monkeypatch.setattr(RegisteredBuffers, "_register", refuse)
    buffer = memoryview(mmap.mmap(-1, PAGE))
    engine.register(buffer)
    fd = os.open(path, os.O_RDONLY)
    assert _read(engine, fd, buffer, 0) == [(1, PAGE)]
    assert bytes(buffer) == path.read_bytes()
    os.close(fd)
