"""A GPU of plain memory whose two streams run as early as they may, or as late.

What is queued runs in order; a stream that waits for an event of the other makes it run that far.
A late stream runs only when it must: when somebody waits for what it has queued.
"""

import ctypes
import mmap
from collections import deque

import numpy as np

from shared.errors import GpuError


class FakeStream:
    def __init__(self, late):
        self.late = late
        self._queue = deque()

    def put(self, work):
        self._queue.append(work)
        if not self.late:
            self.run_all()

    def run_until(self, is_done):
        while not is_done():
            self._queue.popleft()()

    def run_all(self):
        while self._queue:
            self._queue.popleft()()

    def wait_event(self, event):
        target, number = event.stream, event.count
        if target is not None:
            self.put(lambda: target.run_until(lambda: event.done_count >= number))


class FakeEvent:
    def __init__(self):
        self.stream = None
        self.count = self.done_count = 0

    def record(self, stream):
        assert self.stream in (None, stream)
        self.stream = stream
        self.count += 1
        number = self.count

        def reach():
            self.done_count = number

        stream.put(reach)

    def synchronize(self):
        if self.stream is not None:
            number = self.count
            self.stream.run_until(lambda: self.done_count >= number)


class FakeUploadDevice:
    """refuses: pins. copy_count: those that have been made."""

    name = "cpu"

    def __init__(self, late_copies=False, late_kernels=False, refuses=False, budget_bytes=1 << 40):
        self.copying = FakeStream(late_copies)
        self._computing = FakeStream(late_kernels)
        self.refuses = refuses
        self.pinned = {}
        self.pin_tries = 0
        self.copy_count = 0
        self._budget_bytes = budget_bytes
        self._memory = []
        self._ring = []

    def computing(self):
        return self._computing

    def launch(self, kernel):
        self._computing.put(kernel)

    def finish(self):
        self._computing.run_all()
        self.copying.run_all()

    def event(self):
        return FakeEvent()

    def allocate(self, size_bytes):
        self._budget_bytes -= size_bytes
        if self._budget_bytes < 0:
            raise GpuError("out of memory")
        self._memory.append(np.full(size_bytes, 0xFF, np.uint8))
        return self._memory[-1].ctypes.data

    def allocate_pinned(self, size_bytes):
        address = self.allocate(size_bytes)
        self._ring.append((address, size_bytes))
        return address

    def pin(self, address, size_bytes):
        assert address % mmap.PAGESIZE == size_bytes % mmap.PAGESIZE == 0
        self.pin_tries += 1
        if self.refuses:
            return False
        end = address + size_bytes
        assert all(end <= at or at + size <= address for at, size in self.pinned.items())
        self.pinned[address] = size_bytes
        return True

    def unpin(self, address):
        assert not self.copying._queue, "a copy may be reading it"
        if self.pinned.pop(address, None) is None:
            raise GpuError("it is not pinned")

    def copy(self, copy):
        end = copy.source + copy.size_bytes
        ranges = [*self.pinned.items(), *self._ring]
        assert any(at <= copy.source and end <= at + size for at, size in ranges)

        def run():
            self.copy_count += 1
            ctypes.memmove(*copy)

        self.copying.put(run)
