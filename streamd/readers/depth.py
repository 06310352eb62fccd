"""How many bytes to keep in flight: as few as keep the disk busy.

More in flight than the disk can use only makes each read wait longer; less leaves it idle. Where
the knee lies depends on the drive and on the size of the reads, so it is found while reading. A
window of reads gives the rate at one limit, and the limit moves:

    GROW   a step up, as long as each step makes the rate grow
    HOLD   stay, for many windows: trying costs a little
    SHRINK a step down, as long as the rate stays; one step too far is taken back, and then HOLD
"""

from enum import Enum, auto

MIN_LIMIT_BYTES = 2 << 20
MAX_LIMIT_BYTES = 128 << 20
START_LIMIT_BYTES = 32 << 20
STEP = 1.25
# Rates that differ by less are the same.
TOLERANCE = 0.04
HOLD_WINDOWS = 32
WINDOW_READS = 32


class _Move(Enum):
    GROW = auto()
    HOLD = auto()
    SHRINK = auto()


class DepthController:
    """Pure arithmetic; told of each read that ended, and of moments when none was waiting."""

    def __init__(
        self,
        start_bytes: int = START_LIMIT_BYTES,
        min_bytes: int = MIN_LIMIT_BYTES,
        max_bytes: int = MAX_LIMIT_BYTES,
    ) -> None:
        assert 0 < min_bytes <= start_bytes <= max_bytes
        self.limit_bytes = start_bytes
        self._min_bytes, self._max_bytes = min_bytes, max_bytes
        self._move = _Move.GROW
        self._hold_left = 0
        self._last_rate = 0.0
        self._window_started_s = 0.0
        self._window_bytes = self._window_reads = 0

    def idle(self) -> None:
        """The disk was not kept busy: what this window would tell is not the disk's rate."""
        self._window_reads = 0

    def ended(self, size_bytes: int, now_s: float) -> None:
        """A read has ended, and others waited for its place."""
        if self._window_reads == 0:
            self._window_started_s, self._window_bytes = now_s, 0
        else:
            self._window_bytes += size_bytes
        self._window_reads += 1
        enough = self._window_bytes >= 2 * self.limit_bytes and self._window_reads > WINDOW_READS
        elapsed_s = now_s - self._window_started_s
        if enough and elapsed_s > 0:
            self._judge(self._window_bytes / elapsed_s)
            self._window_reads = 0

    def _judge(self, rate: float) -> None:
        better = rate > self._last_rate * (1 + TOLERANCE)
        worse = rate < self._last_rate * (1 - TOLERANCE)
        match self._move:
            case _Move.GROW if better:
                self._step(STEP)
            case _Move.GROW:
                # The last step brought nothing; the one before may have brought only a part.
                self._begin(_Move.HOLD)
            case _Move.SHRINK if worse:
                self._step(STEP)
                self._begin(_Move.HOLD)
                return  # this rate is not that of the limit held now
            case _Move.SHRINK:
                self._step(1 / STEP)
            case _Move.HOLD if worse:
                self._begin(_Move.GROW)
                self._step(STEP)
            case _Move.HOLD:
                self._hold_left -= 1
                if self._hold_left > 0:
                    return  # the rate held is compared with, not the one of a moment ago
                self._begin(_Move.SHRINK)
                self._step(1 / STEP)
        self._last_rate = rate

    def _begin(self, move: _Move) -> None:
        self._move = move
        self._hold_left = HOLD_WINDOWS

    def _step(self, factor: float) -> None:
        """A step changes how many reads are in flight by one at least."""
        read_bytes = self._window_bytes / max(1, self._window_reads - 1)
        change = max(abs(self.limit_bytes * (factor - 1)), read_bytes)
        wanted = self.limit_bytes + (change if factor > 1 else -change)
        self.limit_bytes = int(min(max(wanted, self._min_bytes), self._max_bytes))
