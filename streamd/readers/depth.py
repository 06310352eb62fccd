"""How many bytes to keep in flight: as few as keep the disk busy.

More in flight than the disk can use makes each read wait longer, and costs rate on some disks; less
leaves it idle. Where the knee lies depends on the drive and on the size of the reads, so it is
found while reading, in two states:

    TRIAL  Windows of reads alternate between the limit held and its double (or its half):

               held | double | held | double ...    each | gives the difference of two rates

           They add up until their sum decides: noise and slow drift cancel, a large difference
           decides at once, a small one after many windows. The double has to bring a gain: of
           limits as good as each other the smaller one wins. The winner is tried against the next
           limit on the same side.
    HOLD   Nothing is tried for many windows, twice as many after each trial that changed nothing;
           then the other side is. A rate that has changed for good ends it early.

HOLD_WINDOWS_MAX lie between two trials in the end, so that they cost less than 1%.
"""

import math

from streamd.readers.rate_window import RateWindow

MIN_LIMIT_BYTES = 2 << 20
MAX_LIMIT_BYTES = 128 << 20
START_LIMIT_BYTES = 16 << 20
WINDOW_LIMITS = 2
# Rates are compared by their logarithms: 0.02 is 2%. To be taken, a double has to bring more than
# to be kept: some disks give a deeper queue more for tenths of a second, and then less.
MIN_GAIN = 0.02
MIN_GAIN_UPWARDS = 0.1
DECISIVE_SUM = 0.3
# A disk that stood still for a moment shows larger differences.
MAX_DIFFERENCE = 0.5
TRIAL_DIFFERENCES_MAX = 16
HOLD_WINDOWS_MIN = 64
HOLD_WINDOWS_MAX = 256
# The mean of a few windows differs so much from that of many: the disk is not what it was.
CHANGE = 0.25
FEW, MANY = 4, 32


class DepthController:
    """Pure arithmetic; told of each read that ended, and of moments when none was waiting.

    min_bytes <= limit_bytes <= max_bytes always: where they are equal the limit is fixed.
    """

    def __init__(
        self,
        start_bytes: int = START_LIMIT_BYTES,
        min_bytes: int = MIN_LIMIT_BYTES,
        max_bytes: int = MAX_LIMIT_BYTES,
    ) -> None:
        assert 0 < min_bytes <= start_bytes <= max_bytes
        self.limit_bytes = self._held_bytes = self._other_bytes = start_bytes
        self._min_bytes, self._max_bytes = min_bytes, max_bytes
        self._window = RateWindow()
        self._settled = False  # what ended last began under the present limit
        self._needed_bytes = start_bytes
        self._upwards = False  # the side of the last trial
        self._sides_left = 2  # to be tried before holding
        self._hold_windows = 0  # nothing has been tried yet
        self._count = 0  # of windows in this hold, or of differences in this trial
        self._sum = self._few_mean = self._many_mean = 0.0
        self._last: float | None = None  # the other limit's rate in the window before

    @classmethod
    def fixed(cls, limit_bytes: int) -> "DepthController":
        """One that never changes its limit."""
        return cls(limit_bytes, limit_bytes, limit_bytes)

    def idle(self) -> None:
        """The disk was not kept busy: the window tells nothing, and a trial is interrupted."""
        self.limit_bytes = self._held_bytes
        self._last = None
        self._window.reset()
        self._settled, self._needed_bytes = False, self.limit_bytes

    def ended(self, size_bytes: int, now_s: float) -> None:
        """A read has ended, and others waited for its place."""
        rate = self._window.ended(size_bytes, now_s, self._needed_bytes)
        if rate is None:
            return
        before_bytes = self.limit_bytes
        if self._settled:
            judge = self._watch if self._other_bytes == self._held_bytes else self._compare
            judge(math.log(rate), size_bytes)
        self._settled = self.limit_bytes == before_bytes
        # What was in flight under another limit ends first, and is not counted.
        in_flight_bytes = max(before_bytes - size_bytes, 1)
        self._needed_bytes = in_flight_bytes * (WINDOW_LIMITS if self._settled else 1)

    def _watch(self, rate: float, read_bytes: int) -> None:
        self._count += 1
        self._few_mean += (rate - self._few_mean) / min(self._count, FEW)
        self._many_mean += (rate - self._many_mean) / min(self._count, MANY)
        if abs(self._few_mean - self._many_mean) > CHANGE or self._hold_windows == 0:
            self._hold_windows, self._sides_left = HOLD_WINDOWS_MIN, 2
            self._try(self._held_bytes < self._max_bytes, rate, read_bytes)
        elif self._count >= self._hold_windows:
            self._hold_windows, self._sides_left = min(2 * self._hold_windows, HOLD_WINDOWS_MAX), 1
            self._try(not self._upwards, rate, read_bytes)

    def _compare(self, rate: float, read_bytes: int) -> None:
        """The two limits' windows alternate, but for those that were interrupted."""
        low_bytes, high_bytes = sorted((self._held_bytes, self._other_bytes))
        before, self._last = self._last, rate
        if before is not None:
            self._count += 1
            gain = rate - before if self.limit_bytes == high_bytes else before - rate
            self._sum += min(max(gain, -MAX_DIFFERENCE), MAX_DIFFERENCE) - (
                MIN_GAIN_UPWARDS if self._upwards else MIN_GAIN
            )
        if abs(self._sum) < DECISIVE_SUM and self._count < TRIAL_DIFFERENCES_MAX:
            self.limit_bytes = low_bytes if self.limit_bytes == high_bytes else high_bytes
            return
        winner_bytes = high_bytes if self._sum > 0 else low_bytes
        winner_rate = rate if self.limit_bytes == winner_bytes else before
        if winner_bytes != self._held_bytes:
            self._held_bytes = winner_bytes
            self._hold_windows, self._sides_left = HOLD_WINDOWS_MIN, 1
            self._try(self._upwards, winner_rate, read_bytes)
        elif self._sides_left > 1:
            self._sides_left = 1
            self._try(not self._upwards, winner_rate, read_bytes)
        else:
            self._hold()

    def _try(self, upwards: bool, rate: float | None, read_bytes: int) -> None:
        """Against its double or half, unless that is as many reads; rate: of the limit held."""
        self._hold()
        self._upwards = upwards
        half_bytes = self._held_bytes // 2
        if upwards:
            self._other_bytes = min(2 * max(self._held_bytes, read_bytes), self._max_bytes)
        elif half_bytes >= read_bytes:
            self._other_bytes = max(half_bytes, self._min_bytes)
        self.limit_bytes = self._other_bytes
        self._last, self._sum = rate, 0.0

    def _hold(self) -> None:
        self.limit_bytes = self._other_bytes = self._held_bytes
        self._count = 0
