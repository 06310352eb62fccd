"""Where uploads come from: the daemon's host slots, pinned one by one as they are first used.

Their pages are there by then, since a slab has been read into them. What is not pinned goes by way
of pinned memory of our own: where the driver refuses, where slots share pages, and where the daemon
may give pages back, which would then not be those that the GPU reads.
"""

import logging
import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from infer.daemon.mapping import Mapping
from infer.resident.streamed_layers import Copy
from infer.uploads.bounce import BounceRing
from infer.uploads.device import UploadDevice
from shared.arena import ArenaLayout
from shared.errors import GpuError
from shared.experts import ExpertIndex

log = logging.getLogger(__name__)


class HostSlots:
    """Of one attachment, whose memory is mapped at least until `close`."""

    def __init__(
        self, device: UploadDevice, bounce: BounceRing, mapping: Mapping, experts: ExpertIndex
    ) -> None:
        self._device, self._bounce = device, bounce
        attached = mapping.attached
        parts = tuple(c.part_bytes for c in experts.classes)
        layout = ArenaLayout(parts, tuple(attached.class_slot_counts), attached.align)
        self._stretches = layout.stretches()
        self._stretches[:, :, 0] += mapping.arena_address
        self._pinned = np.zeros(layout.slot_count, np.bool_)
        self._pins = mapping.stays and attached.align % mmap.PAGESIZE == 0

    def copy(self, slot: int, copies: Sequence[Copy]) -> None:
        """Queue the copies of what lies in a slot."""
        if self._pins and not self._pinned[slot]:
            self._pin(slot)
        copy_one = self._device.copy if self._pinned[slot] else self._bounce.copy
        for copy in copies:
            copy_one(copy)

    def _pin(self, slot: int) -> None:
        first, last = self._stretches[slot, 0].tolist(), self._stretches[slot, -1].tolist()
        try:
            self._pinned[slot] = self._device.pin(first[0], sum(last) - first[0])
        except BaseException:  # Ctrl-C: nobody would know that it is pinned
            self._pinned[slot] = False
            with suppress(GpuError):  # or it is not
                self._device.unpin(first[0])
            raise
        if not self._pinned[slot]:
            self._pins = False
            log.warning("the driver pins no more of the daemon's memory: uploads take a way round")

    def close(self) -> None:
        """No copy from a slot is under way any more."""
        for slot in np.flatnonzero(self._pinned):
            with suppress(GpuError):  # after a fatal one the driver lets nothing go
                self._device.unpin(int(self._stretches[slot, 0, 0]))
        self._pinned[:] = False
        self._pins = False
