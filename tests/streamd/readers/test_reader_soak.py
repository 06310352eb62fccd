"""A hundred thousand reads leave nothing behind: neither memory nor descriptors."""

import gc
import mmap
import os
import select
import time
from pathlib import Path

import pytest

from streamd.readers.direct import OpenFile
from streamd.readers.probe import make_engine
from streamd.readers.reader import Reader
from streamd.readers.slab_read import Extent, SlabRead

PAGE = 4096
READS = 100_000
READS_A_SLAB = 10
DEPTH = 16
PLACES = 2000
SLABS_AT_ONCE = 20  # far fewer than there are places for: none is read into twice at a time
WARM_SLABS = 1500
GROWTH_MAX_BYTES = 2 << 20
PATIENCE_S = 60.0


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.fixture
def cached_file(tmp_path):
    """In the page cache, where it stays: `direct` without O_DIRECT, so that it is not dropped."""
    path = tmp_path / "data"
    path.write_bytes(os.urandom(64 * PAGE))
    fd = os.open(path, os.O_RDONLY)
    status = os.fstat(fd)
    yield OpenFile(fd, path, status.st_size, status.st_mtime_ns, PAGE, direct=True, reason="")
    os.close(fd)


def test_nothing_grows(engine_name, cached_file, monkeypatch):
    if engine_name == "liburing":  # what it remembers of buffers is thrown out again and again
        monkeypatch.setattr("streamd.readers.liburing_engine.IOVECS_MAX", 64)
    memory = memoryview(mmap.mmap(-1, PLACES * PAGE))
    memory[:] = bytes(len(memory))
    places = [memory[at * PAGE : (at + 1) * PAGE] for at in range(PLACES)]
    content = cached_file.path.read_bytes()
    reader = Reader(make_engine(engine_name, DEPTH), [cached_file], DEPTH)
    bell = select.poll()
    bell.register(reader.fileno(), select.POLLIN)
    deadline_s = time.monotonic() + PATIENCE_S

    def read(first: int, last: int) -> None:
        waiting, under_way = iter(range(first, last)), 0
        while True:
            while under_way < SLABS_AT_ONCE and (slab := next(waiting, None)) is not None:
                numbers = range(slab * READS_A_SLAB, (slab + 1) * READS_A_SLAB)
                extents = (Extent(0, n % 64 * PAGE, PAGE, places[n % PLACES]) for n in numbers)
                reader.submit(SlabRead(slab, tuple(extents)))
                under_way += 1
            if not under_way:
                return
            assert time.monotonic() < deadline_s
            bell.poll(1000)
            for completion in reader.poll():
                assert completion.error is None
                under_way -= 1

    read(0, WARM_SLABS)
    before_bytes, before_fds = resident_bytes(), os.listdir("/proc/self/fd")
    read(WARM_SLABS, READS // READS_A_SLAB)
    assert reader.stats().reads == READS
    assert resident_bytes() - before_bytes < GROWTH_MAX_BYTES
    assert os.listdir("/proc/self/fd") == before_fds
    last = READS - 1
    assert places[last % PLACES] == content[last % 64 * PAGE :][:PAGE]
    reader.close()
