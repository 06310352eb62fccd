"""The memory that the daemon shares: one memfd a region, writable for the daemon alone.

Reads into 2 MiB pages cost a tenth of the CPU of reads into 4 KiB pages, and clients compute from
them with fewer TLB misses. For memory shared by descriptor there are two ways to get them, neither
of which works on a machine as installed: hugetlb pages (vm.nr_overcommit_hugepages), and
transparent ones for shmem (shmem_enabled=advise). We try both and take what there is.
"""

import ctypes
import mmap
import os
from contextlib import suppress

from shared import shm
from shared.arena import round_up
from shared.errors import ConfigError
from streamd.readers.engine import address_of
from streamd.tiers.pages import HUGE_PAGE_BYTES, PageReport, huge_page_settings, page_report

# linux/falloc.h
_KEEP_SIZE = 1
_PUNCH_HOLE = 2

_libc = ctypes.CDLL(None, use_errno=True)


class Region:
    """A memfd and the daemon's writable mapping of it; nobody else can map it writable.

    returnable: its pages can be given back one by one. The kernel refuses that for memory that is
    sealed against writing, so others get a descriptor for reading, of a file whose mode lets nobody
    open it for writing, instead of a seal.

    sparse: most of it is never touched, so hugetlb pages, which are reserved for all of it, will
    not do.

    size_bytes: as asked for, or rounded up to whole huge pages.
    page_kind: what its first page is, by smaps. All of a large mapping is not looked at again: the
    kernel goes through its every page for that, 15 ms a GB.
    """

    def __init__(
        self, name: str, size_bytes: int, returnable: bool = False, sparse: bool = False
    ) -> None:
        if size_bytes >= HUGE_PAGE_BYTES:
            size_bytes = round_up(size_bytes, HUGE_PAGE_BYTES)
        self.size_bytes = size_bytes
        self.fd, self.memory = _allocate(name, size_bytes, sparse)
        self._own_fd = -1
        try:
            if returnable:
                self._own_fd, self.fd = self.fd, shm.open_readonly(self.fd)
            else:
                shm.seal_readonly(self.fd)
            self.memory[0] = 0
            self.page_kind = self.pages().kind
        except BaseException:
            self.close()
            raise

    def pages(self) -> PageReport:
        """What the mapping stands on by now; pages come as they are touched."""
        return page_report(shm.address(self.memory))

    def give_back(self, part: memoryview) -> None:
        """Let the whole pages go that lie in a part of a returnable region; they read as zeros."""
        assert self._own_fd >= 0
        page_bytes = HUGE_PAGE_BYTES if self.page_kind.startswith("hugetlb") else mmap.PAGESIZE
        offset = address_of(part) - shm.address(self.memory)
        first = round_up(offset, page_bytes)
        stop = (offset + part.nbytes) // page_bytes * page_bytes
        if stop > first:
            _punch(self._own_fd, first, stop - first)

    def close(self) -> None:
        """Give the descriptors up; the mapping goes with the last view of it."""
        os.close(self.fd)
        if self._own_fd >= 0:
            os.close(self._own_fd)


def _punch(fd: int, offset: int, size_bytes: int) -> None:
    where = (ctypes.c_long(offset), ctypes.c_long(size_bytes))
    if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, *where):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _allocate(name: str, size_bytes: int, sparse: bool) -> tuple[int, mmap.mmap]:
    if not sparse and size_bytes >= HUGE_PAGE_BYTES and huge_page_settings().hugetlb_pages:
        with suppress(ConfigError):  # fewer are left than the region needs
            return _map_new(shm.create(name, size_bytes, huge_pages=True), size_bytes)
    fd, memory = _map_new(shm.create(name, size_bytes), size_bytes)
    _advise_huge(memory)
    return fd, memory


def _advise_huge(memory: mmap.mmap) -> None:
    """Ask for transparent huge pages; kernels without them refuse."""
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)


def private_memory(size_bytes: int) -> mmap.mmap:
    """Memory of this process alone, on huge pages where the machine has them (most do)."""
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(
            f"cannot get {size_bytes} bytes of memory: {error.strerror}",
            "raise the address-space limit (ulimit -v), or end other programs",
        ) from error
    _advise_huge(memory)
    return memory


def _map_new(fd: int, size_bytes: int) -> tuple[int, mmap.mmap]:
    try:
        return fd, shm.map_writable(fd, size_bytes)
    except BaseException:
        os.close(fd)
        raise


class AreaRegion:
    """A client's own area: the client writes it, so it is sealed against resizing only."""

    def __init__(self, size_bytes: int) -> None:
        self.fd, self.memory = _map_new(shm.create("streamd-client", size_bytes), size_bytes)

    def close(self) -> None:
        os.close(self.fd)
