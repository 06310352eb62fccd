"""Which of the experts that the GPU lacks the CPU computes. Pure policy, of experts of one size.

Some lie in host slots: these can be uploaded, or computed where they are. The others have to be
read from the disk first, and then the same holds for them. Bus, disk and CPU work at the same time,
so the layer goes on when the slowest of them is done. The experts are shared out so that it ends
first, and, where the disk leaves a choice, so that bus and CPU are done first. The hottest are
uploaded, since what is uploaded is there the next time.
"""

from collections.abc import Set
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from infer.lane.pace import MOST_TIMES, Pace

# Guesses until something has been measured: of bus, disk and CPU, bytes a second, and what comes
# before the first byte. On the fast side, so that each of them is tried.
_UPLOAD = 12e9, 0.3e-3
_DISK = 5e9, 0.5e-3
_CPU = 20e9, 0.05e-3
_START_S, START_RATE = 0.15e-3, 1 / 32
# What has been decided holds for so many layers.
SHARE_SPLITS = 32
# What came no later than so many times the bus's own time was the bus's doing.
BUS_BOUND_TIMES = 1.1

Integers = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Split:
    """Places in a list of missing experts: for the CPU, those in host slots first, and for the GPU,
    from host slots and from the disk."""

    computed: npt.NDArray[np.intp]
    uploaded: npt.NDArray[np.intp]
    read: npt.NDArray[np.intp]


class LanePolicy:
    """Paces: upload and disk, from the asking until the last is in its GPU slot, or host slot;
    compute, of the CPU's work alone. start_s: from the asking until that begins, if it can."""

    def __init__(self, slab_bytes: int) -> None:
        self.upload, self.disk, self.compute = (
            Pace(start_s, slab_bytes / bytes_per_s)
            for bytes_per_s, start_s in (_UPLOAD, _DISK, _CPU)
        )
        self.start_s = _START_S
        self._shares: dict[tuple[int, int], tuple[int, bool]] = {}
        self._split_count = 0

    def split(self, in_host: npt.NDArray[np.bool_], uses: Integers) -> Split:
        """in_host [n]: which of the missing are in host slots; uses [n]: how hot each is."""
        places, read = in_host.nonzero()[0], (~in_host).nonzero()[0]
        count, reads = self._recent_share(len(places), len(read))
        by_heat = places[np.argsort(uses[places], kind="stable")]
        if reads:
            return Split(np.concatenate((by_heat[:count], read)), by_heat[count:], read[:0])
        return Split(by_heat[:count], by_heat[count:], read)

    def _recent_share(self, host_count: int, disk_count: int) -> tuple[int, bool]:
        """As `share`, by the paces of a while ago: they change little, and it takes 50 us."""
        self._split_count += 1
        if self._split_count % SHARE_SPLITS == 0:
            self._shares.clear()
        counts = host_count, disk_count
        if counts not in self._shares:
            self._shares[counts] = self.share(*counts)
        return self._shares[counts]

    def share(self, host_count: int, disk_count: int) -> tuple[int, bool]:
        """How many of those in host slots are for the CPU, and whether what is read is too."""
        ways = product(range(host_count + 1), (False, True) if disk_count else (False,))
        return min(ways, key=lambda way: self._ends_s(host_count, disk_count, *way))

    def _ends_s(
        self, host_count: int, disk_count: int, count: int, reads: bool
    ) -> tuple[float, float]:
        """When the layer can go on, and when bus and CPU are done with what is in host slots."""
        upload, compute = self.upload, self.compute
        computed_s = self.start_s + compute.seconds(count) if count else 0.0
        uploaded_s = upload.seconds(host_count - count)
        lanes_s = max(computed_s, uploaded_s)
        if not disk_count:
            return lanes_s, lanes_s
        disk_s = self.disk.seconds(disk_count)
        if reads:
            all_computed_s = self.start_s + compute.seconds(count + disk_count)
            end_s = max(lanes_s, all_computed_s, disk_s + compute.seconds(1))
        else:
            all_uploaded_s = upload.seconds(host_count - count + disk_count)
            end_s = max(lanes_s, all_uploaded_s, disk_s + upload.each_s)
        return end_s, lanes_s

    def started(self, seconds: float) -> None:
        """The CPU's work has begun so long after the asking."""
        self.start_s += START_RATE * (min(seconds, MOST_TIMES * self.start_s) - self.start_s)

    def values_ms(self) -> dict[str, float]:
        """For statistics: what one expert takes by each way, and one more."""
        paces = {"upload": self.upload, "disk": self.disk, "compute": self.compute}
        first = {f"first_{name}": pace.seconds(1) for name, pace in paces.items()}
        each = {f"each_{name}": pace.each_s for name, pace in paces.items()}
        values = {"start": self.start_s, **first, **each}
        return {name: round(1e3 * seconds, 4) for name, seconds in values.items()}

    def not_computed(self) -> None:
        """Nothing is known of the CPU for that layer: it may have become faster since."""
        self.compute.note_at_most(1, self.compute.seconds(1))


class Arrivals:
    """How long the fetched experts of one layer took, by which of them came when.

    uploaded: from host slots; read: from the disk first; each expert by any number of its own.
    """

    def __init__(self, policy: LanePolicy, uploaded: Set[int], read: Set[int]) -> None:
        self._policy = policy
        self._uploaded, self._uploaded_count = set(uploaded), len(uploaded)
        self._read, self._read_count = set(read), len(read)

    def note(self, arrived: Set[int], seconds: float, at_once: bool) -> None:
        """These have come, so long after the asking. at_once: they were there when they were looked
        for first, so perhaps long before."""
        upload, disk = self._policy.upload, self._policy.disk
        if self._uploaded and self._uploaded <= arrived:
            (upload.note_at_most if at_once else upload.note)(self._uploaded_count, seconds)
        if self._read and self._read <= arrived:
            # Where the bus alone would have taken as long, the disk may have been done long before.
            bus_s = upload.seconds(self._uploaded_count + self._read_count)
            by_bus = seconds <= BUS_BOUND_TIMES * bus_s
            read_s = max(0.0, seconds - upload.each_s)
            (disk.note_at_most if at_once or by_bus else disk.note)(self._read_count, read_s)
        self._uploaded.difference_update(arrived)
        self._read.difference_update(arrived)
