"""Where uploads come from: slabs in host slots, pinned the first time one is uploaded."""

import logging
from collections.abc import Sequence
from contextlib import suppress

from shared.arena import PART_COUNT, ArenaLayout
from shared.errors import GpuError
from shared.experts import ExpertIndex
from streamd.gpu.device import Copy, GpuDevice

log = logging.getLogger(__name__)


class HostSource:
    """address: where the host arena of `layout` begins.

    Slots are pinned one by one, so that no copy crosses from one pinned range into the next. Their
    pages are there by then, since a slab has been read into them.
    """

    def __init__(
        self, device: GpuDevice, layout: ArenaLayout, address: int, experts: ExpertIndex
    ) -> None:
        self._device = device
        self._experts = experts
        self._align = layout.align
        self._stretches = layout.stretches()
        self._stretches[:, :, 0] += address
        self._pinned = [False] * layout.slot_count
        self._refused = False

    def copies(self, slot: int, layer: int, expert: int, targets: Sequence[int]) -> list[Copy]:
        """What brings an expert from its host slot to three device addresses."""
        if not (self._pinned[slot] or self._refused):
            self._pin(slot)
        parts = self._experts.extents(layer, expert)
        starts = self._stretches[slot, :, 0].tolist()
        return [
            Copy(
                targets[part],
                starts[part] + parts[part].offset % self._align,
                parts[part].length,
            )
            for part in range(PART_COUNT)
        ]

    def _pin(self, slot: int) -> None:
        first, last = self._stretches[slot, 0], self._stretches[slot, -1]
        size_bytes = int(last[0] + last[1] - first[0])
        self._pinned[slot] = self._device.pin(int(first[0]), size_bytes)
        if not self._pinned[slot]:
            self._refused = True
            log.warning("the driver pins no more host memory: uploads are slower from here on")

    def unpin(self, slot: int) -> None:
        """Let a slot go whose memory is about to be given back."""
        if self._pinned[slot]:
            self._device.unpin(int(self._stretches[slot, 0, 0]))
            self._pinned[slot] = False

    def close(self) -> None:
        for slot, pinned in enumerate(self._pinned):
            if pinned:
                with suppress(GpuError):  # after a fatal one the driver lets nothing go
                    self._device.unpin(int(self._stretches[slot, 0, 0]))
        self._pinned = [False] * len(self._pinned)
