"""How much memory the host tier may hold, by what the machine has left. Pure policy.

    available   0 ........ low .............. good .................... all that can be had
                  shrink      leave it be         grow, when calm for a while

Others' need is met at once, down to the tier's floor; what has become free again is taken back by
halves, so that a program that comes and goes is not fought over.
"""

# Of what could be had before the tier took anything.
LOW_DIVISOR = 32
GOOD_DIVISOR = 16
CALM_S = 30.0


class Governor:
    """floor_bytes, full_bytes: the least and the most the tier may hold. `limit_bytes` is between.

    initial_bytes: what could be had before the tier took anything.
    """

    def __init__(self, floor_bytes: int, full_bytes: int, initial_bytes: int) -> None:
        assert floor_bytes <= full_bytes
        self.limit_bytes = full_bytes
        self._floor_bytes = floor_bytes
        self._full_bytes = full_bytes
        self._low_bytes = initial_bytes // LOW_DIVISOR
        self._good_bytes = initial_bytes // GOOD_DIVISOR
        self._calm_since_s: float | None = None

    def look(self, available_bytes: int, held_bytes: int, now_s: float) -> int:
        """The limit from now on. held_bytes: what the tier has in memory, limit or not."""
        if available_bytes < self._low_bytes:
            # By what is held: what has been asked for before and takes its time is not asked anew.
            wanted_bytes = held_bytes - (self._good_bytes - available_bytes)
            self.limit_bytes = max(self._floor_bytes, min(self.limit_bytes, wanted_bytes))
        if available_bytes <= self._good_bytes:
            self._calm_since_s = None
        elif self._calm_since_s is None:
            self._calm_since_s = now_s
        elif now_s - self._calm_since_s >= CALM_S:
            self._calm_since_s = now_s
            more_bytes = (available_bytes - self._good_bytes) // 2
            self.limit_bytes = min(self._full_bytes, self.limit_bytes + more_bytes)
        return self.limit_bytes
