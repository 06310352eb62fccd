"""A GPU that is plain memory: copies are made when the test says so, and not a moment before."""

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Sequence

from fake_copies import CopiesAtOnce

from infer.resident.copy_lane import joined
from shared import shm
from shared.arena import round_up
from shared.device_copies import Copy
from shared.errors import GpuError, StreamError

GRANULARITY_BYTES = 1 << 16


class FakeMemory:
    """A memfd in the place of an exported allocation."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = shm.create("fake-gpu", size_bytes)
        self._memory = shm.map_writable(self.fd, size_bytes)
        self.address = shm.address(self._memory)

    def close(self) -> None:
        os.close(self.fd)


class FakeDevice:
    """at_once: copies are made as soon as somebody looks, as a very fast GPU would."""

    granularity_bytes = GRANULARITY_BYTES
    name = "fake GPU"
    uuid = "00" * 16

    def __init__(self, ordinal: int = 0, free_bytes: int = 8 << 30, at_once: bool = False) -> None:
        self.ordinal = ordinal
        self.free_bytes = free_bytes
        self.at_once = at_once
        self.pinned: dict[int, int] = {}
        self.pin_tries = 0
        self.refuses_pins = False
        self.refuses_copies = False
        self.closed = False
        self.queued: deque[tuple[int, list[Copy]]] = deque()
        self._ended: list[tuple[int, StreamError | None]] = []

    def memory_bytes(self) -> tuple[int, int]:
        return self.free_bytes, self.free_bytes

    def allocate(self, size_bytes: int) -> FakeMemory:
        return FakeMemory(round_up(size_bytes, GRANULARITY_BYTES))

    def pin(self, address: int, size_bytes: int) -> bool:
        self.pin_tries += 1
        if not self.refuses_pins:
            end = address + size_bytes
            assert all(end <= at or at + size <= address for at, size in self.pinned.items())
            self.pinned[address] = size_bytes
        return not self.refuses_pins

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def submit(self, token: int, copies: Sequence[Copy]) -> None:
        if self.refuses_copies:
            raise GpuError("cuMemcpyHtoDAsync says CUDA_ERROR_UNKNOWN")
        self.queued.append((token, list(copies)))

    def finish(self, count: int = 1) -> None:
        """The next copies are made now."""
        for _ in range(count):
            token, copies = self.queued.popleft()
            for target, source, size_bytes in copies:
                ctypes.memmove(target, source, size_bytes)
            self._ended.append((token, None))

    def fail(self) -> None:
        """The next copies go wrong."""
        token, _ = self.queued.popleft()
        self._ended.append((token, GpuError("a copy to the GPU says CUDA_ERROR_UNKNOWN")))

    def reap(self) -> list[tuple[int, StreamError | None]]:
        if self.at_once:
            self.finish(len(self.queued))
        ended, self._ended = self._ended, []
        return ended

    @property
    def copying(self) -> bool:
        return bool(self.queued or self._ended)

    def drain(self) -> None:
        self.finish(len(self.queued))

    def close(self) -> None:
        self.closed = True


class FakeLane(CopiesAtOnce):
    """A client's copies: made at once, out of memory that would have been pinned only."""

    def __init__(self, _device, buffer_bytes, host, _keepalive):
        super().__init__(buffer_bytes)
        self._pinned = joined(host)
        assert all(at % mmap.PAGESIZE == 0 == size % mmap.PAGESIZE for at, size in self._pinned)

    def copy(self, copy):
        end = copy.source + copy.size_bytes
        assert any(at <= copy.source and end <= at + size for at, size in self._pinned)
        super().copy(copy)
