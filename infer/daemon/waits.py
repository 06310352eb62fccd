"""Time: what a client's sections have waited for, and what of it the disk was idle."""

from dataclasses import dataclass, replace

# Of the time that a slab takes, for each slab that came; of the rest, for each layer.
RATE = 1 / 32


@dataclass
class Waits:
    """Cumulative, seconds. `served`: experts that were waited for to the last, and how long they
    took from the asking; sections whose experts had come before anybody waited say nothing.
    overlapped: own work during all of which something that had been asked for was on its way."""

    waited_s: float = 0.0
    overlapped_s: float = 0.0
    served_s: float = 0.0
    served_count: int = 0

    def copy(self) -> "Waits":
        return replace(self)


class IdleTime:
    """Time that was left to the disk, in slabs that it could have read.

    slab_count: not yet spent, at most `most`. slabs_a_layer: what comes with each layer.
    """

    def __init__(self, most: int) -> None:
        self.slab_count = 0.0
        self.slabs_a_layer = float(most)
        self._most = most
        self._slab_s = 0.0
        self._last_s: float | None = None
        self._before = Waits()

    def count(self, now_s: float, waits: Waits) -> None:
        """A layer has passed: what was not spent waiting was left."""
        before = self._before
        served_count = waits.served_count - before.served_count
        if served_count > 0:
            sample_s = (waits.served_s - before.served_s) / served_count
            rate = min(1.0, served_count * RATE) if self._slab_s else 1.0
            self._slab_s += rate * (sample_s - self._slab_s)
        if self._slab_s and self._last_s is not None:
            busy_s = waits.waited_s - before.waited_s + waits.overlapped_s - before.overlapped_s
            idle_s = max(0.0, now_s - self._last_s - busy_s)
            slabs = min(self._most, idle_s / self._slab_s)
            self.slab_count = min(self._most, max(self.slab_count, 0.0) + slabs)
            self.slabs_a_layer += RATE * (slabs - self.slabs_a_layer)
        self._last_s = now_s
        self._before = waits.copy()
