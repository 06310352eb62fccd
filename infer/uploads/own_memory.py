"""What one client has in GPU memory for itself, and the table of it: see SlotCache, Mapping."""

from dataclasses import replace

import numpy as np

from infer.daemon.mapping import Mapping
from infer.uploads.bounce import BounceRing
from infer.uploads.device import UploadDevice
from infer.uploads.slot_cache import SlotCache
from shared.device_copies import Copy
from shared.experts import ExpertIndex, resident_tensors
from shared.gguf_index import GgufIndex
from shared.gpu_plan import GpuPlan
from shared.residency import ClientArea, ResidencyTable, TableShape
from shared.resident import gpu_resident_layout, resident_layout
from shared.streamed import chosen_layers, kept_tensors


class OwnMemory:
    """Slots and resident tensors, as `plan` has them. GpuError where that much is not had.

    table, area: as the daemon's and a client's, in memory that nobody else has; rows: of the table.
    stretches: addresses int64 [slots, 3].
    is_limited: the plan is all that may be taken.
    """

    def __init__(
        self, device: UploadDevice, plan: GpuPlan, experts: ExpertIndex, is_limited: bool
    ) -> None:
        self._device, self._plan, self._is_limited = device, plan, is_limited
        shape = TableShape(experts.n_layers, experts.n_experts)
        self.table = ResidencyTable(bytearray(shape.table_bytes), shape)
        self.table.initialise()
        self.area = ClientArea(bytearray(shape.area_bytes), shape)
        self.area.initialise()
        self.rows = self.table.gpu_slots
        self.cache = SlotCache(plan.layout, experts, self.rows, self.area)
        self._arena_address = device.allocate(plan.layout.total_bytes)
        self._resident_address = device.allocate(plan.resident_bytes)
        self._offsets = plan.layout.stretches()[:, :, 0]
        self.stretches = self._offsets + self._arena_address

    def upload_resident(self, index: GgufIndex, host: Mapping, bounce: BounceRing) -> None:
        """What is not streamed, from the daemon's memory; waited for."""
        layers = chosen_layers(index, self._plan.streamed.layers)
        source = resident_layout(resident_tensors(index), host.attached.align)
        starts = {p.tensor.name: host.resident_address + p.payload_offset for p in source.tensors}
        for placed in gpu_resident_layout(kept_tensors(index, layers)).tensors:
            target = self._resident_address + placed.payload_offset
            bounce.copy(Copy(target, starts[placed.tensor.name], placed.tensor.byte_count))
        uploaded = self._device.event()
        uploaded.record(self._device.copying)
        uploaded.synchronize()

    def mapping(self, host: Mapping) -> Mapping:
        """As the daemon would have given it out, had it all this; beside what the host tier has."""
        self.table.tracing = host.table.tracing
        attached = replace(
            host.attached,
            client_bytes=self._plan.reserve_bytes,
            client_limited=self._is_limited,
            streamed_layers=list(self._plan.streamed.layers),
            host_resident_bytes=host.attached.resident_bytes,
            host_align=host.attached.align,
        )
        return replace(
            host,
            attached=attached,
            table=self.table,
            area=self.area,
            device=self._device.name,
            arena_address=self._arena_address,
            resident_address=self._resident_address,
            stretch_offsets=self._offsets,
            part_deltas=np.zeros_like(host.part_deltas),
            packed=True,
        )
