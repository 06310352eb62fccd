"""The daemon's memory, mapped into a client."""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared import shm
from shared.arena import ArenaLayout
from shared.errors import ProtocolMismatch
from shared.experts import ExpertIndex
from shared.residency import ClientArea, ResidencyTable, TableShape
from shared.wire import Attached


@dataclass(frozen=True)
class TierMemory:
    """A tier's two allocations, mapped; torch's name of the device whose addresses they have.

    packed: every payload begins with its stretch, whatever its offset in the file.
    stays: it is host memory whose pages the daemon cannot give back, so that they may be pinned.
    host_resident: the resident tensors, if they lie in host memory.
    """

    device: str
    packed: bool
    arena_address: int
    resident_address: int
    keepalive: tuple[object, ...]
    stays: bool = False
    host_resident: mmap.mmap | None = None


@dataclass(frozen=True)
class Mapping:
    """The daemon's memory in our address space, and the numbers that belong to it.

    part_deltas: where in its stretch each payload begins, bytes. host_resident: all resident
    tensors as the daemon has read them; None for a GPU that has them all. packed, stays: of the
    tier, see TierMemory.
    """

    attached: Attached
    table: ResidencyTable
    area: ClientArea
    device: str
    arena_address: int
    resident_address: int
    stretch_offsets: npt.NDArray[np.int64]  # [slots, 3]
    part_deltas: npt.NDArray[np.int64]  # [n_layers, n_experts, 3]
    keepalive: tuple[object, ...]
    packed: bool
    stays: bool
    host_resident: mmap.mmap | None


MapTier = Callable[[Attached, int, int], TierMemory]  # descriptors of arena and resident tensors


def map_memory(
    attached: Attached, descriptors: list[int], experts: ExpertIndex, map_tier: MapTier
) -> Mapping:
    """Map what the daemon handed out and close the descriptors: those of Attached, in that order,
    without the doorbell.

    ProtocolMismatch where the daemon's numbers are not those of `experts`.
    """
    try:
        table_fd, area_fd, arena_fd, resident_fd, *host_fds = descriptors
        shape = TableShape(attached.n_layers, attached.n_experts)
        parts = tuple(c.part_bytes for c in experts.classes)
        layout = ArenaLayout(parts, tuple(attached.class_slot_counts), attached.align)
        if (shape.n_layers, shape.n_experts) != (experts.n_layers, experts.n_experts) or (
            layout.total_bytes > attached.arena_bytes
        ):
            raise ProtocolMismatch(
                "the daemon divides its memory in another way than this version does",
                "daemon and client are of different versions: restart the daemon",
            )
        table_region = shm.map_readonly(table_fd, shape.table_bytes)
        area_region = shm.map_writable(area_fd, shape.area_bytes)
        memory = map_tier(attached, arena_fd, resident_fd)
        host_regions = [shm.map_readonly(fd, attached.host_resident_bytes) for fd in host_fds]
    finally:
        for fd in descriptors:
            os.close(fd)
    table = ResidencyTable(table_region, shape)
    table.check_header()
    offsets = experts.part_offsets
    return Mapping(
        attached,
        table,
        ClientArea(area_region, shape),
        memory.device,
        memory.arena_address,
        memory.resident_address,
        layout.stretches()[:, :, 0],
        np.zeros_like(offsets) if memory.packed else offsets % attached.align,
        (table_region, area_region, *memory.keepalive),
        memory.packed,
        memory.stays,
        next(iter(host_regions), memory.host_resident),
    )


def map_host_tier(attached: Attached, arena_fd: int, resident_fd: int) -> TierMemory:
    """Read-only mappings of the host tier's memfds."""
    arena = shm.map_readonly(arena_fd, attached.arena_bytes)
    stays = shm.is_sealed(arena_fd)
    if not attached.resident_bytes:
        return TierMemory("cpu", False, shm.address(arena), 0, (arena,), stays)
    resident = shm.map_readonly(resident_fd, attached.resident_bytes)
    addresses = shm.address(arena), shm.address(resident)
    return TierMemory("cpu", False, *addresses, (arena, resident), stays, resident)
