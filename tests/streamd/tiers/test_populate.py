"""Pages found by a thread: nobody waits, every buffer is answered once, faults come back."""

import errno
import mmap
import os
import select
import threading
import time

import pytest

from shared import shm
from streamd.readers.slab_read import Priority
from streamd.tiers import populate as populate_module
from streamd.tiers.pages import page_report
from streamd.tiers.populate import PageFinder, Populator, populate

PAGE = mmap.PAGESIZE
PATIENCE_S = 10.0


def resident_bytes(memory: mmap.mmap) -> int:
    return page_report(shm.address(memory)).resident_bytes


@pytest.fixture
def memory():
    memory = mmap.mmap(-1, 64 * PAGE)  # shared: a mapping of its own in smaps
    yield memory
    memory.close()


@pytest.mark.parametrize("find", [populate, PageFinder()])
def test_pages_are_found_for_the_buffer_alone(memory, find):
    find(memoryview(memory)[8 * PAGE + 100 : 40 * PAGE - 100])
    assert resident_bytes(memory) == 32 * PAGE
    find(memoryview(memory)[8 * PAGE + 100 : 40 * PAGE - 100])
    assert resident_bytes(memory) == 32 * PAGE


def test_a_kernel_that_does_not_know_the_advice_is_served_by_touching(memory, monkeypatch):
    monkeypatch.setattr(populate_module, "_MADV_POPULATE_WRITE", 9999)
    memory[:PAGE] = b"x" * PAGE
    populate(memoryview(memory)[PAGE : 5 * PAGE])
    assert resident_bytes(memory) == 5 * PAGE
    assert memory[:PAGE] == b"x" * PAGE


def test_memory_that_is_not_to_be_had_is_an_error():
    fd = os.memfd_create("short")
    os.ftruncate(fd, 4 * PAGE)
    memory = mmap.mmap(fd, 4 * PAGE)
    os.ftruncate(fd, PAGE)  # touching what is behind the end would end the process
    for find in populate, PageFinder():
        with pytest.raises(OSError):  # noqa: PT011 - EFAULT or ENOMEM, as the kernel likes
            find(memoryview(memory))
    memory.close()
    os.close(fd)


def wait_for(populator: Populator, count: int) -> list:
    bell = select.poll()
    bell.register(populator.fileno(), select.POLLIN)
    ended, deadline_s = [], time.monotonic() + PATIENCE_S
    while len(ended) < count:
        assert time.monotonic() < deadline_s
        bell.poll(1000)
        ended += populator.ended()
    while bell.poll(50):  # it may be rung after what it was rung for has been taken
        assert populator.ended() == []
    assert populator.ended() == []
    return ended


def test_every_buffer_is_answered_once_and_faults_are_told(memory):
    def find(buffer: memoryview) -> None:
        if buffer.nbytes == PAGE:
            raise OSError(errno.ENOMEM, "no memory")

    populator = Populator(find)
    sizes = [PAGE * (1 + key % 2) for key in range(50)]
    for key, size in enumerate(sizes):
        populator.submit(key, memoryview(memory)[:size])
    ended = dict(wait_for(populator, 50))
    assert ended.keys() == set(range(50))
    for key, size in enumerate(sizes):
        assert ended[key] == ("no memory" if size == PAGE else "")
    populator.close()


def test_nobody_waits_for_it_and_closing_waits_for_the_one_at_hand_alone(memory):
    begun, go_on = threading.Event(), threading.Event()
    found = []

    def find(buffer: memoryview) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        found.append(buffer.nbytes)

    before = set(os.listdir("/proc/self/fd"))
    populator = Populator(find)
    for _ in range(10):
        populator.submit("key", memoryview(memory))
    assert begun.wait(PATIENCE_S)
    assert populator.ended() == []
    threading.Timer(0.05, go_on.set).start()
    populator.close()
    assert len(found) == 1
    assert set(os.listdir("/proc/self/fd")) == before


def test_what_somebody_waits_for_goes_first(memory):
    begun, go_on = threading.Event(), threading.Event()

    def find(buffer: memoryview) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)

    populator = Populator(find)
    populator.submit("at hand", memoryview(memory), Priority.BACKFILL)
    assert begun.wait(PATIENCE_S)
    for priority in (Priority.BACKFILL, Priority.PREFETCH, Priority.DEMAND):
        for number in range(2):
            populator.submit((priority.name, number), memoryview(memory), priority)
    go_on.set()
    assert [key for key, _ in wait_for(populator, 7)] == [
        "at hand",
        *((name, number) for name in ("DEMAND", "PREFETCH", "BACKFILL") for number in range(2)),
    ]
    populator.close()
