"""Reads into memory that the ring knows beforehand, and into memory it would not take."""

import mmap
import os
import resource
import select

import pytest

from shared import shm
from streamd.readers import registered_buffers
from streamd.readers.engine import address_of
from streamd.readers.probe import make_engine, try_in_child
from streamd.readers.registered_buffers import OwnRing
from streamd.tiers.pages import page_report
from streamd.tiers.populate import PageFinder

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


NOBODY = 65534
TINY_MEMLOCK_BYTES = 64 << 10


def _become_nobody_with_little_memlock() -> None:
    """Nobody has a user's account of pinned memory, and no right to go beyond it."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (TINY_MEMLOCK_BYTES, TINY_MEMLOCK_BYTES))
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def test_memory_that_may_not_be_pinned_is_read_into_all_the_same(engine, tmp_path, in_child):
    path = tmp_path / "data"
    content = os.urandom(64 * PAGE)
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read_with_little_memlock() -> str:
        _become_nobody_with_little_memlock()
        own = make_engine("liburing", 8)
        whole = memoryview(mmap.mmap(-1, 64 * PAGE))
        small, large = whole[:PAGE], whole[32 * PAGE :]
        own.register(small)
        own.register(large)
        assert own._registered.index_of(address_of(small), PAGE) == 0
        assert own._registered.index_of(address_of(large), PAGE) is None, "it was pinned"
        for buffer in (small, large):
            assert _read(own, fd, buffer, PAGE) == [(1, buffer.nbytes)]
            assert bytes(buffer) == content[PAGE : PAGE + buffer.nbytes]
        return "read"

    assert in_child(read_with_little_memlock) == "read"
    os.close(fd)


def test_pages_are_found_where_nothing_may_be_pinned(engine, in_child):
    def find() -> str:
        _become_nobody_with_little_memlock()
        ring = OwnRing.open()
        memory = memoryview(mmap.mmap(-1, 64 * PAGE))
        ring.pin_for_a_moment(memory)
        assert bytes(memory) == bytes(64 * PAGE)
        ring.close()
        return "found"

    assert in_child(find) == "found"


def test_pinning_for_a_moment_leaves_pages_behind(engine):
    ring = OwnRing.open()
    memory = mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for _ in range(3):
        ring.pin_for_a_moment(memoryview(memory)[: 32 * PAGE])
    assert page_report(shm.address(memory)).resident_bytes >= 32 * PAGE
    ring.close()
    memory.close()


def test_no_ring_to_pin_with_is_no_fault(monkeypatch):
    monkeypatch.setattr(registered_buffers, "kernel_is_since", lambda version: False)
    assert OwnRing.open() is None
    memory = mmap.mmap(-1, 4 * PAGE)
    find_pages = PageFinder()
    find_pages(memoryview(memory))
    find_pages.close()
    memory.close()


@pytest.mark.parametrize(
    ("release", "since"),
    [
        ("6.15.0-rc1", True),
        ("6.18.44-fc", True),
        ("7.0.1", True),
        ("6.14.11", False),
        ("5.10.0", False),
    ],
)
def test_versions_of_the_kernel_are_compared_by_number(release, since, monkeypatch):
    monkeypatch.setattr(registered_buffers.platform, "release", lambda: release)
    assert registered_buffers.kernel_is_since((6, 15)) is since
