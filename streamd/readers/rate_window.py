"""The rate of a disk that is kept busy, between moments at which nothing is half counted.

Many disks answer everything they have been given at nearly the same time, and then nothing for
milliseconds. A window that began or ended within such a bunch would be wrong by as much as is in
flight; so it begins and ends where a bunch is over:

    ends   ||||      ||||      ||||      ||||
              |<------ a window ------>|
"""

# A pause is a gap longer than this share of the window's mean; evenly spaced ends are all pauses.
PAUSE_SHARE = 0.5


class RateWindow:
    """Windows back to back, until `reset`."""

    def __init__(self) -> None:
        self._started_s = self._last_end_s = 0.0
        self._bytes = self._reads = 0
        self._open = False

    def reset(self) -> None:
        """The disk was not kept busy: the next read that ends opens a window of its own."""
        self._open = False

    def ended(
        self, size_bytes: int, now_s: float, needed_bytes: int, needed_s: float = 0.0
    ) -> float | None:
        """A read has ended: bytes a second of the window that was over before it, if one was.

        needed_bytes: so many have to end in a window, at least; needed_s: it lasts as long.
        """
        if not self._open:
            self._open = True
            self._start(now_s)
            return None
        rate = None
        elapsed_s = self._last_end_s - self._started_s
        if self._bytes >= needed_bytes and elapsed_s > 0 and elapsed_s >= needed_s:
            gap_s = now_s - self._last_end_s
            if gap_s * self._reads > PAUSE_SHARE * elapsed_s:
                rate = self._bytes / elapsed_s
                self._start(self._last_end_s)
        self._bytes += size_bytes
        self._reads += 1
        self._last_end_s = now_s
        return rate

    def _start(self, now_s: float) -> None:
        self._started_s = self._last_end_s = now_s
        self._bytes = self._reads = 0
