"""Plain preads on a pool of threads: works everywhere, costs a thread a read in flight."""

import errno
import os
import threading
import time
from queue import SimpleQueue

from shared.threads import start_thread
from streamd.ended_queue import EndedQueue
from streamd.readers.engine import DEPTH_MAX

CLOSE_PATIENCE_S = 1.0

Job = tuple[int, int, memoryview, int]  # token, descriptor, buffer, offset


class PreadEngine:
    name = "pread"

    def __init__(self, depth: int) -> None:
        assert 0 < depth <= DEPTH_MAX
        self.depth = depth
        self._in_flight: set[int] = set()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()  # never more than `depth`
        self._ended = EndedQueue[tuple[int, int]]()
        self._threads = [
            threading.Thread(target=self._work, name=f"pread-{index}", daemon=True)
            for index in range(depth)
        ]
        for thread in self._threads:
            start_thread(thread)

    def fileno(self) -> int:
        return self._ended.fileno()

    def register(self, buffer: memoryview) -> None:
        """Nothing to be gained here."""

    def forget(self, buffer: memoryview) -> None:
        """There is nothing to forget."""

    def submit(self, token: int, fd: int, buffer: memoryview, offset: int) -> None:
        assert len(self._in_flight) < self.depth
        assert token not in self._in_flight
        self._in_flight.add(token)
        self._jobs.put((token, fd, buffer, offset))

    def flush(self) -> None:
        """Nothing is ever held back."""

    def reap(self) -> list[tuple[int, int]]:
        ended = self._ended.take()
        self._in_flight.difference_update(token for token, _ in ended)
        return ended

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + CLOSE_PATIENCE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        # A thread stuck in a dead disk still holds the bell's number: it must not become another's.
        if not any(thread.is_alive() for thread in self._threads):
            self._ended.close()

    def _work(self) -> None:
        while self._serve(self._jobs.get()):
            pass

    def _serve(self, job: Job | None) -> bool:
        # A function of its own, so that an idle thread holds on to no buffer.
        if job is None:
            return False
        token, fd, buffer, offset = job
        try:
            result = os.preadv(fd, [buffer], offset)
        except OSError as error:
            result = -(error.errno or errno.EIO)
        self._ended.put((token, result))
        return True
