"""A thread that waits for copies, so that the main loop can wait for everything by descriptors.

CUDA has no pollable events. Waiting in the driver gives up the GIL and the processor; the ring it
ends with is the main loop's wake-up call.
"""

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Waiter:
    """`wait(event)` blocks until the event is done and returns what went wrong, or None."""

    def __init__(self, prepare: Callable[[], None], wait: Callable[[Any], Any]) -> None:
        self._prepare = prepare
        self._wait = wait
        self._events: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._done: deque[tuple[int, Any, Any]] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="gpu-waiter", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._bell

    def put(self, token: int, event: Any) -> None:
        self._events.put((token, event))

    def take(self) -> list[tuple[int, Any, Any]]:
        """(token, event, what went wrong) of those that are done, in the order of `put`."""
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return []
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """Waits for all events."""
        self._events.put(None)
        self._thread.join()
        os.close(self._bell)

    def _run(self) -> None:
        self._prepare()
        while (item := self._events.get()) is not None:
            token, event = item
            self._done.append((token, event, self._wait(event)))
            os.eventfd_write(self._bell, 1)
