"""The memory that the daemon shares: one memfd a region, writable for the daemon alone."""

import mmap
import os

from shared import shm


class Region:
    """A memfd and the daemon's writable mapping of it; nobody else can map it writable."""

    def __init__(self, name: str, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = shm.create(name, size_bytes)
        self.memory: mmap.mmap = shm.map_writable(self.fd, size_bytes)
        shm.seal_readonly(self.fd)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Takes effect only where the machine allows it for shared memory.
            self.memory.madvise(mmap.MADV_HUGEPAGE)

    def close(self) -> None:
        """Give the descriptor up; the mapping goes with the last view of it."""
        os.close(self.fd)


class AreaRegion:
    """A client's own area: the client writes it, so it is sealed against resizing only."""

    def __init__(self, size_bytes: int) -> None:
        self.fd = shm.create("streamd-client", size_bytes)
        self.memory: mmap.mmap = shm.map_writable(self.fd, size_bytes)

    def close(self) -> None:
        os.close(self.fd)
