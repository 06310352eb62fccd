"""What a reader needs from whatever carries its reads to the kernel."""

import ctypes
import errno
import time
from collections.abc import Callable
from typing import Protocol

DEPTH_MAX = 1024
"""More reads in flight than any one drive can use."""

SUBMIT_TRIES_MAX = 100
SUBMIT_PAUSE_S = 0.001


class Engine(Protocol):
    """Carries reads to the kernel and brings back their results, in whatever order they end.

    Used by one thread. No method waits: `fileno()` polls readable once something has ended, and
    every `submit` is answered by exactly one entry of a later `reap`.
    """

    name: str
    depth: int  # most reads in flight

    def fileno(self) -> int: ...

    def register(self, buffer: memoryview) -> None:
        """Announces memory that will be read into again and again; a hint, never refused."""

    def forget(self, buffer: memoryview) -> None:
        """Takes back what `register` was told, if anything was; nothing is read into it now."""

    def submit(self, token: int, fd: int, buffer: memoryview, offset: int) -> None:
        """Reads from `offset` into the whole of `buffer`, which is kept alive until it has ended.

        May be held back until `flush`. At most `depth` may be in flight.
        """

    def flush(self) -> None:
        """Hands over what `submit` has held back."""

    def reap(self) -> list[tuple[int, int]]:
        """(token, bytes read or -errno) of each read that has ended since."""

    def close(self) -> None:
        """Reads still in flight may write to their buffers after this returns."""


def address_of(buffer: memoryview) -> int:
    """Where a writable, contiguous buffer of at least one byte begins in memory."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(buffer))


def submit_prepared(submit: Callable[[], int], prepared: int) -> None:
    """Calls a ring's `submit` until the kernel has taken all `prepared` entries.

    It takes fewer when it is short of memory for a moment; raises OSError if that does not end.
    """
    for _ in range(SUBMIT_TRIES_MAX):
        try:
            prepared -= submit()
        except OSError as error:
            if error.errno not in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                raise
            time.sleep(SUBMIT_PAUSE_S)
        if prepared <= 0:
            return
    raise OSError(errno.EAGAIN, f"the kernel leaves {prepared} reads in the submission queue")
