"""Where uploads come from: slabs in host slots, pinned the first time one is uploaded."""

from collections.abc import Sequence

from shared.arena import PART_COUNT, ArenaLayout
from shared.device_copies import Copy, PinnedSlots
from shared.experts import ExpertIndex
from streamd.gpu.device import GpuDevice


class HostSource:
    """address: where the host arena of `layout` begins."""

    def __init__(
        self, device: GpuDevice, layout: ArenaLayout, address: int, experts: ExpertIndex
    ) -> None:
        self._experts = experts
        self._align = layout.align
        stretches = layout.stretches()
        stretches[:, :, 0] += address
        self._starts: list[list[int]] = stretches[:, :, 0].tolist()
        self._slots = PinnedSlots(
            device,
            stretches,
            "the driver pins no more host memory: uploads are slower from here on",
        )

    def copies(self, slot: int, layer: int, expert: int, targets: Sequence[int]) -> list[Copy]:
        """What brings an expert from its host slot to three device addresses."""
        self._slots.pin(slot)
        parts = self._experts.extents(layer, expert)
        starts = self._starts[slot]
        return [
            Copy(
                targets[part],
                starts[part] + parts[part].offset % self._align,
                parts[part].length,
            )
            for part in range(PART_COUNT)
        ]

    def unpin(self, slot: int) -> None:
        """Let a slot go whose memory is about to be given back."""
        self._slots.unpin(slot)

    def close(self) -> None:
        self._slots.close()
