"""How long so many experts take, by what they took lately: a line, start + count * each."""

# An observation counts for so much; the first ones for more.
RATE = 1 / 64
EAGER_COUNT = 4
# What is only known to have been done by then may have taken that much less.
OPTIMISM = 0.8
# One stall, of a process that was stopped or a disk that slept, says nothing about the next time.
MOST_TIMES = 4.0
# Where the counts were all alike, nothing is known of a start: the line goes through 0 then.
_THROUGH_ZERO = 0.05
# A guess stands for observations at one to four experts.
_GUESSED_COUNT, _GUESSED_VARIANCE = 2.5, 1.25


class Pace:
    """Least squares with exponentially fading weights, ridged a little, started from a guess.

    The line never falls, and begins at 0 or above: more experts take no less time.
    """

    def __init__(self, start_s: float, each_s: float) -> None:
        self._count, self._variance = _GUESSED_COUNT, _GUESSED_VARIANCE
        self._seconds = start_s + each_s * _GUESSED_COUNT
        self._covariance = each_s * _GUESSED_VARIANCE
        self._noted_count = 0

    @property
    def each_s(self) -> float:
        """What one more expert takes."""
        proportional_s = self._seconds / self._count
        sums = self._covariance + _THROUGH_ZERO * proportional_s, self._variance + _THROUGH_ZERO
        return min(max(sums[0] / sums[1], 0.0), proportional_s)

    def seconds(self, count: int) -> float:
        """Of so many experts; none take no time."""
        return self._seconds + self.each_s * (count - self._count) if count else 0.0

    def note(self, count: int, seconds: float) -> None:
        """So many, at least one, have taken that long."""
        expected_s = self.seconds(count)
        self._noted_count += 1
        rate = max(RATE, 1 / (EAGER_COUNT + self._noted_count))
        if self._noted_count > EAGER_COUNT:
            seconds = min(seconds, MOST_TIMES * expected_s)
        more, longer = count - self._count, seconds - self._seconds
        self._count += rate * more
        self._seconds += rate * longer
        self._variance = (1 - rate) * (self._variance + rate * more * more)
        self._covariance = (1 - rate) * (self._covariance + rate * more * longer)

    def note_at_most(self, count: int, seconds: float) -> None:
        """So many were done when somebody looked after that time, perhaps long before."""
        self.note(count, min(seconds, OPTIMISM * self.seconds(count)))
