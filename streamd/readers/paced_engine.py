"""A drive of a given speed, for benchmarks: another engine's reads, let through no faster.

A machine with a slow disk can so stand in for one with a fast NVMe: the file lies in memory, and
each read ends when a drive of that bandwidth and latency would have ended it. Reads share one line,
as they do on a drive:

    end = max(end of the read before, start + latency) + bytes / bandwidth
"""

import ctypes
import os
import select
import struct
import time
from collections import deque
from collections.abc import Callable

from streamd.readers.engine import Engine

DEFAULT_LATENCY_S = 80e-6  # of a random read on a consumer NVMe
_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC


class PacedEngine:
    """`bytes_per_s`, `latency_s`: of the drive that is stood in for. The inner engine is ours."""

    def __init__(
        self,
        inner: Engine,
        bytes_per_s: float,
        latency_s: float = DEFAULT_LATENCY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert bytes_per_s > 0
        self.name = f"paced {bytes_per_s / 1e9:g} GB/s over {inner.name}"
        self.depth = inner.depth
        self._inner = inner
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._clock = clock
        self._started_s: dict[int, float] = {}
        self._held: deque[tuple[float, int, int]] = deque(maxlen=inner.depth)
        self._line_free_s = 0.0
        self._alarm = _Alarm()
        self._alarm_due_s: float | None = None  # None: it is not set
        self._either = select.epoll()
        self._either.register(inner.fileno(), select.EPOLLIN)
        self._either.register(self._alarm.fd, select.EPOLLIN)

    def fileno(self) -> int:
        return self._either.fileno()

    def register(self, buffer: memoryview) -> None:
        self._inner.register(buffer)

    def forget(self, buffer: memoryview) -> None:
        self._inner.forget(buffer)

    def submit(self, token: int, fd: int, buffer: memoryview, offset: int) -> None:
        assert len(self._started_s) + len(self._held) < self.depth
        self._started_s[token] = self._clock()
        self._inner.submit(token, fd, buffer, offset)

    def flush(self) -> None:
        self._inner.flush()

    def reap(self) -> list[tuple[int, int]]:
        for token, result in self._inner.reap():
            earliest_s = self._started_s.pop(token) + self._latency_s
            start_s = max(self._line_free_s, earliest_s)
            self._line_free_s = start_s + max(result, 0) / self._bytes_per_s
            self._held.append((self._line_free_s, token, result))
        now_s = self._clock()
        ended = []
        while self._held and self._held[0][0] <= now_s:
            _, token, result = self._held.popleft()
            ended.append((token, result))
        due_s = self._held[0][0] if self._held else None
        if due_s != self._alarm_due_s:
            self._alarm_due_s = due_s
            # At least a nanosecond: 0 would mean never.
            self._alarm.set(0.0 if due_s is None else max(1e-9, due_s - now_s))
        return ended

    def close(self) -> None:
        self._either.close()
        self._alarm.close()
        self._inner.close()


class _Alarm:
    """A timerfd(2): a descriptor that becomes readable after a while. In Python from 3.13 only."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")

    def set(self, seconds: float) -> None:
        """Ring once after `seconds`, and not before; 0 or less: not at all."""
        whole, nanoseconds = divmod(max(0, round(seconds * 1e9)), 1_000_000_000)
        # struct itimerspec: interval (seconds, nanoseconds), first expiry (the same)
        spec = struct.pack("=qqqq", 0, 0, whole, nanoseconds)
        if self._libc.timerfd_settime(self.fd, 0, spec, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def close(self) -> None:
        os.close(self.fd)
