"""Where uploads come from: the daemon's host slots, pinned one by one as they are first used.

What is not pinned goes by way of pinned memory of our own: where the driver refuses, where slots
share pages, and where the daemon may give pages back, which would then not be those that the GPU
reads.
"""

import mmap
from collections.abc import Sequence

from infer.daemon.mapping import Mapping
from infer.uploads.bounce import BounceRing
from infer.uploads.device import UploadDevice
from shared.arena import ArenaLayout
from shared.device_copies import Copy, PinnedSlots
from shared.experts import ExpertIndex


class HostSlots:
    """Of one attachment, whose memory is mapped at least until `close`."""

    def __init__(
        self, device: UploadDevice, bounce: BounceRing, mapping: Mapping, experts: ExpertIndex
    ) -> None:
        self._device, self._bounce = device, bounce
        attached = mapping.attached
        parts = tuple(c.part_bytes for c in experts.classes)
        layout = ArenaLayout(parts, tuple(attached.class_slot_counts), attached.align)
        stretches = layout.stretches()
        stretches[:, :, 0] += mapping.arena_address
        self._slots = PinnedSlots(
            device,
            stretches,
            "the driver pins no more of the daemon's memory: uploads take a way round",
        )
        self._pins = mapping.stays and attached.align % mmap.PAGESIZE == 0

    def copy(self, slot: int, copies: Sequence[Copy]) -> None:
        """Queue the copies of what lies in a slot."""
        is_pinned = self._pins and self._slots.pin(slot)
        copy_one = self._device.copy if is_pinned else self._bounce.copy
        for copy in copies:
            copy_one(copy)

    def close(self) -> None:
        """No copy from a slot is under way any more."""
        self._slots.close()
