"""How many bytes to keep in flight: as few as keep the disk busy.

More in flight than the disk can use makes each read wait longer, and costs rate on some disks; less
leaves it idle. Where the knee lies depends on the drive and on the size of the reads, so it is
found while reading, in two states:

    TRIAL  Windows of reads alternate between the limit held and its half (or its double):

               held | half | held | half ...      each | gives the difference of two rates

           They add up until their sum decides: noise and slow drift cancel, a large difference
           decides at once, a small one after many windows. The larger limit has to bring a gain:
           of limits as good as each other the smaller one wins. The winner is tried against the
           next limit on the same side.
    HOLD   Nothing is tried for many windows, twice as many after each trial that changed nothing;
           then the other side is. A rate that has changed for good ends it early.

Some disks answer a deeper queue with more for tenths of a second, and with less from then on, which
short windows do not see: they share it. So a larger limit that wins narrowly is tried once more, in
windows that last longer than that, each after a time for the disk to settle. The first search does
without: it has to be quick, and is looked at again after the first HOLD.

HOLD_WINDOWS_MAX lie between two trials in the end, so that they cost less than 1%.
"""

import math

from streamd.readers.rate_window import RateWindow

MIN_LIMIT_BYTES = 2 << 20
MAX_LIMIT_BYTES = 128 << 20
# Four reads of 1.6 MB: one disk gave 2.0 GB/s to those and 1.7 to eight or more.
START_LIMIT_BYTES = 15 << 19
WINDOW_LIMITS = 2
# Rates are compared by their logarithms: 0.02 is 2%. To be taken, a double has to bring more than
# to be kept, or noise would carry the limit up and down.
MIN_GAIN = 0.03
MIN_GAIN_UPWARDS = 0.06
DECISIVE_SUM = 0.3
# A disk that stood still for a moment shows larger differences.
MAX_DIFFERENCE = 0.5
TRIAL_DIFFERENCES_MAX = 16
# On the mean, beyond the gain asked for: what wins by less wins narrowly.
CLEAR_GAIN = 0.2
SLOW_SETTLE_S, SLOW_WINDOW_S = 0.3, 0.4
SLOW_DECISIVE_SUM = 0.1
SLOW_DIFFERENCES_MAX = 4
HOLD_WINDOWS_MIN = 64
HOLD_WINDOWS_MAX = 256
HOLD_WINDOW_S = 0.02
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
        self._needed_bytes, self._needed_s = start_bytes // 2, 0.0
        self._upwards = False  # the side of the last trial
        self._slow = False  # the trial goes on in long windows
        self._sides_left = 2  # to be tried before holding
        self._hold_windows = 0  # before the next trial; 0: it is still searching
        self._count = 0  # of windows in this hold, or of differences in this trial
        self._sum = self._few_mean = self._many_mean = 0.0
        self._last: float | None = None  # the other limit's rate in the window before

    @classmethod
    def fixed(cls, limit_bytes: int) -> "DepthController":
        """One that never changes its limit."""
        return cls(limit_bytes, limit_bytes, limit_bytes)

    @property
    def _in_trial(self) -> bool:
        return self._other_bytes != self._held_bytes

    @property
    def _searching(self) -> bool:
        return self._hold_windows == 0

    def idle(self) -> None:
        """The disk was not kept busy: the window tells nothing, and a trial is interrupted.

        A slow one is given up: where reads come in bursts, its windows would never be over.
        """
        self.limit_bytes = self._held_bytes
        if self._slow:
            self._hold()
        self._last = None
        self._window.reset()
        self._begin_window(self.limit_bytes, settled=False)

    def ended(self, size_bytes: int, now_s: float) -> None:
        """A read has ended, and others waited for its place."""
        rate = self._window.ended(size_bytes, now_s, self._needed_bytes, self._needed_s)
        if rate is None:
            return
        before_bytes = self.limit_bytes
        if self._settled:
            judge = self._compare if self._in_trial else self._watch
            judge(math.log(rate), size_bytes)
        # What was in flight under another limit ends first, and is not counted.
        in_flight_bytes = max(before_bytes - size_bytes, 1)
        self._begin_window(in_flight_bytes, settled=self.limit_bytes == before_bytes)

    def _begin_window(self, in_flight_bytes: int, settled: bool) -> None:
        self._settled = settled
        # A disk that needs much more than at first is slow until that is found.
        self._needed_bytes = in_flight_bytes * (
            WINDOW_LIMITS if settled and not self._searching else 1
        )
        if self._slow:
            self._needed_s = SLOW_WINDOW_S if settled else SLOW_SETTLE_S
        else:
            self._needed_s = 0.0 if self._in_trial or self._searching else HOLD_WINDOW_S

    def _watch(self, rate: float, read_bytes: int) -> None:
        self._count += 1
        self._few_mean += (rate - self._few_mean) / min(self._count, FEW)
        self._many_mean += (rate - self._many_mean) / min(self._count, MANY)
        if abs(self._few_mean - self._many_mean) > CHANGE or self._searching:
            self._hold_windows, self._sides_left = 0, 2
            self._try(True, rate, read_bytes)
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
        decided = self._is_decided()
        narrowly = 0 < self._sum < CLEAR_GAIN * self._count
        if decided and narrowly and not (self._slow or self._searching):
            self._slow, self._count, self._sum, self._last = True, 0, 0.0, None
            decided = False
        if not decided:
            self.limit_bytes = low_bytes if self.limit_bytes == high_bytes else high_bytes
            return
        winner_bytes = high_bytes if self._sum > 0 else low_bytes
        winner_rate = rate if self.limit_bytes == winner_bytes else before
        if winner_bytes != self._held_bytes:
            self._held_bytes = winner_bytes
            self._hold_windows = min(self._hold_windows, HOLD_WINDOWS_MIN)
            self._sides_left = 1
            self._try(self._upwards, winner_rate, read_bytes)
        elif self._sides_left > 1:
            self._sides_left = 1
            self._try(not self._upwards, winner_rate, read_bytes)
        else:
            self._hold()

    def _is_decided(self) -> bool:
        if self._slow:
            return abs(self._sum) >= SLOW_DECISIVE_SUM or self._count >= SLOW_DIFFERENCES_MAX
        return abs(self._sum) >= DECISIVE_SUM or self._count >= TRIAL_DIFFERENCES_MAX

    def _try(self, upwards: bool, rate: float | None, read_bytes: int) -> None:
        """Against the next limit on that side, or else on the other one, if that is due too.

        rate: of the limit held.
        """
        self._upwards, self._slow, self._count = upwards, False, 0
        self._last, self._sum = rate, 0.0
        self.limit_bytes = self._other_bytes = self._next_bytes(upwards, read_bytes)
        if self._in_trial:
            return
        if self._sides_left > 1:
            self._sides_left = 1
            self._try(not upwards, rate, read_bytes)
        else:
            self._hold()

    def _next_bytes(self, upwards: bool, read_bytes: int) -> int:
        """Twice the limit held or half of it; itself where that would be as many reads."""
        if upwards:
            return min(2 * max(self._held_bytes, read_bytes), self._max_bytes)
        half_bytes = self._held_bytes // 2
        return max(half_bytes, self._min_bytes) if half_bytes >= read_bytes else self._held_bytes

    def _hold(self) -> None:
        self.limit_bytes = self._other_bytes = self._held_bytes
        self._slow, self._count = False, 0
        self._hold_windows = max(self._hold_windows, HOLD_WINDOWS_MIN)
