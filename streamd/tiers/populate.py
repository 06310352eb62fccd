"""Pages for memory that is read into for the first time, found by a thread.

The kernel has to find and clear them: 0.1 to 2 ms a MB. On the main loop, be it in a line of ours
or inside io_uring_enter, everybody would wait for that. The calls here wait without the GIL.

Pages are had by pinning them for a moment, where that can be done: the kernel takes those from
blocks that it fragments less, so that neighbours lie side by side in memory, and a read into pages
of 4 KiB is cut into fewer pieces on its way to the drive (docs/measurements.md).
"""

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from itertools import count
from queue import Empty, PriorityQueue

from shared.threads import start_thread
from streamd.ended_queue import EndedQueue
from streamd.readers.engine import address_of
from streamd.readers.registered_buffers import OwnRing
from streamd.readers.slab_read import Priority

_MADV_POPULATE_WRITE = 23  # since Linux 5.14
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_libc = ctypes.CDLL(None, use_errno=True)

# Priority, serial number, key, buffer; no two have the same number, so that no more is compared.
_Job = tuple[int, int, Hashable, memoryview | None]


def populate(buffer: memoryview) -> None:
    """Have pages under all of `buffer`, whose bytes nobody needs. OSError where there are none."""
    address = address_of(buffer)
    start = address // _PAGE_BYTES * _PAGE_BYTES
    size_bytes = address + buffer.nbytes - start
    if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size_bytes), _MADV_POPULATE_WRITE):
        number = ctypes.get_errno()
        if number != errno.EINVAL:
            raise OSError(number, os.strerror(number))
        _libc.memset(ctypes.c_void_p(address), 0, ctypes.c_size_t(buffer.nbytes))


class PageFinder:
    """Finds pages by pinning them where that works, and without where it does not."""

    def __init__(self) -> None:
        self._ring = OwnRing.open()

    def __call__(self, buffer: memoryview) -> None:
        if self._ring is not None:
            self._ring.pin_for_a_moment(buffer)
        populate(buffer)  # has nothing left to do if that has gone well

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()


class Populator:
    """Used by one thread, which waits for `fileno()` and then takes what has `ended`.

    find: has pages under a buffer, or raises OSError; called in a thread of its own.
    """

    def __init__(self, find: Callable[[memoryview], None]) -> None:
        self._find = find
        self._jobs: PriorityQueue[_Job] = PriorityQueue()  # no longer than there are buffers
        self._serial = count()
        self._ended = EndedQueue[tuple[Hashable, str]]()
        self._thread = threading.Thread(target=self._work, name="populate", daemon=True)
        start_thread(self._thread)

    def fileno(self) -> int:
        return self._ended.fileno()

    def submit(
        self, key: Hashable, buffer: memoryview, priority: Priority = Priority.DEMAND
    ) -> None:
        """Exactly one entry of a later `ended` has this key."""
        self._jobs.put((priority, next(self._serial), key, buffer))

    def ended(self) -> list[tuple[Hashable, str]]:
        """Key of each buffer that is done with since, and why it got no pages, or ""."""
        return self._ended.take()

    def close(self) -> None:
        """Forget what waits, and let the buffer at hand be finished."""
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put((Priority.DEMAND, next(self._serial), None, None))
        self._thread.join()
        self._ended.close()

    def _work(self) -> None:
        while self._serve(self._jobs.get()):
            pass

    def _serve(self, job: _Job) -> bool:
        # A function of its own, so that an idle thread holds on to no buffer.
        _, _, key, buffer = job
        if buffer is None:
            return False
        fault = ""
        try:
            self._find(buffer)
        except OSError as error:
            fault = error.strerror or str(error)
        self._ended.put((key, fault))
        return True
