"""The daemon's memory, mapped into a client."""

import os
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
class Mapping:
    """The daemon's memory in our address space, and the numbers that belong to it."""

    attached: Attached
    table: ResidencyTable
    area: ClientArea
    arena_address: int
    resident_address: int
    stretch_offsets: npt.NDArray[np.int64]  # [slots, 3]
    keepalive: tuple[object, ...]


def map_memory(attached: Attached, descriptors: list[int], experts: ExpertIndex) -> Mapping:
    """Map what the daemon handed out and close the descriptors: table, area, arena, resident.

    ProtocolMismatch where the daemon's numbers are not those of `experts`.
    """
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
    table_fd, area_fd, arena_fd, resident_fd = descriptors
    table_region = shm.map_readonly(table_fd, shape.table_bytes)
    area_region = shm.map_writable(area_fd, shape.area_bytes)
    arena = shm.map_readonly(arena_fd, attached.arena_bytes)
    resident = shm.map_readonly(resident_fd, attached.resident_bytes)
    for fd in descriptors:
        os.close(fd)
    table = ResidencyTable(table_region, shape)
    table.check_header()
    return Mapping(
        attached,
        table,
        ClientArea(area_region, shape),
        shm.address(arena),
        shm.address(resident),
        layout.stretches()[:, :, 0],
        (table_region, area_region, arena, resident),
    )
