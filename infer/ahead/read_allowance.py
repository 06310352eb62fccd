"""How many slabs a layer's hints may have read: as many as leave the drive a little idle.

What is read in vain costs nothing while the drive would be idle, and holds up what is waited for
where it is not. How idle it is the daemon tells, whoever keeps it busy. A layer's allowance grows
while the drive is idle for more than TARGET_SHARE of the time, and shrinks while for less.
"""

TARGET_SHARE = 0.1
# Of the difference, slabs a layer.
GAIN = 0.5
LEAST_SLABS = 0.25


class ReadAllowance:
    """slab_count: for each layer, from LEAST_SLABS to `most`."""

    def __init__(self, most: int) -> None:
        self.slab_count = 1.0
        self._most = float(most)
        self._credit = 0.0
        self._before_us: tuple[int, int] | None = None

    def layer_passed(self, drive_us: tuple[int, int]) -> None:
        """drive_us: idle time of the drive, and the time that it is of."""
        before_us, self._before_us = self._before_us, drive_us
        if before_us is not None and (passed_us := drive_us[1] - before_us[1]) > 0:
            idle_share = min(1.0, max(0.0, (drive_us[0] - before_us[0]) / passed_us))
            grown = self.slab_count + GAIN * (idle_share - TARGET_SHARE)
            self.slab_count = min(max(grown, LEAST_SLABS), self._most)
        self._credit = min(self._credit, 1.0) + self.slab_count

    def take(self, wanted_count: int) -> int:
        """How many of those that are wanted for a layer may be read."""
        count = min(wanted_count, int(self._credit))
        self._credit -= count
        return count
