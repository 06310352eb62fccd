"""A bus of a given speed, for benchmarks: another one's copies, let through no faster.

Copies share one line, as on a bus: each takes bytes / bandwidth of it, after the one before.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from shared.device_copies import Copy
from shared.errors import StreamError
from streamd.gpu.device import CopyQueue

Ended = tuple[int, StreamError | None]


class PacedCopies:
    """`bytes_per_s`: of the bus that is stood in for."""

    def __init__(
        self, inner: CopyQueue, bytes_per_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert bytes_per_s > 0
        self._inner = inner
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._due_s: deque[float] = deque()  # in order, as many as the inner queue has
        self._held: deque[tuple[float, Ended]] = deque()
        self._line_free_s = 0.0

    @property
    def copying(self) -> bool:
        return bool(self._held) or self._inner.copying

    def submit(self, token: int, copies: Sequence[Copy]) -> None:
        self._inner.submit(token, copies)
        size_bytes = sum(copy.size_bytes for copy in copies)
        start_s = max(self._line_free_s, self._clock())
        self._line_free_s = start_s + size_bytes / self._bytes_per_s
        self._due_s.append(self._line_free_s)

    def reap(self) -> list[Ended]:
        """In the order of `submit`, as the inner queue's are."""
        for ended in self._inner.reap():
            self._held.append((self._due_s.popleft(), ended))
        now_s = self._clock()
        through = []
        while self._held and self._held[0][0] <= now_s:
            through.append(self._held.popleft()[1])
        return through

    def drain(self) -> None:
        """What is held is there: it is only not told yet."""
        self._inner.drain()
