"""What other threads have done with, for the one that waits for it together with sockets."""

import os
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

Item = TypeVar("Item")


class EndedQueue(Generic[Item]):
    """Any thread puts, one takes. Whoever bounds what is under way bounds this.

    Each item rings once, when it is there. Rings are heard only while an item is there, or the ring
    of one that was taken is due: looking in vain, which the main loop does all the time, costs no
    system call.
    """

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._due_count = 0  # rings not yet heard, of items that have been taken

    def fileno(self) -> int:
        """Readable when `take` has something to do."""
        return self._doorbell

    def put(self, item: Item) -> None:
        self._items.append(item)
        os.eventfd_write(self._doorbell, 1)

    def take(self) -> list[Item]:
        """All that is there, in order."""
        if not self._items and not self._due_count:
            return []
        # Silenced before anything is taken: an item that comes in between rings again.
        with suppress(BlockingIOError):
            self._due_count -= os.eventfd_read(self._doorbell)
        items = [self._items.popleft() for _ in range(len(self._items))]
        self._due_count += len(items)
        return items

    def close(self) -> None:
        """Nobody puts any more: the bell's number may become another's."""
        os.close(self._doorbell)
