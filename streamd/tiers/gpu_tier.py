"""The GPU tier: slots and resident tensors in the memory of one device, shared by descriptor."""

import logging
from collections.abc import Callable
from contextlib import ExitStack

from shared.arena import ArenaLayout
from shared.device_copies import Copy
from shared.errors import GpuNotShared, StreamError
from shared.experts import ExpertIndex
from shared.gpu_plan import GpuPlan, plan_gpu
from shared.layer_choice import Residents
from shared.resident import ResidentLayout
from shared.slot_plan import class_slots
from shared.wire import GPU_TIER
from streamd.gpu.cuda_device import CudaDevice
from streamd.gpu.device import CopyQueue, GpuDevice
from streamd.gpu.host_source import HostSource
from streamd.gpu.paced_copies import PacedCopies
from streamd.scheduling.scheduler import Scheduler, layer_slab_bytes
from streamd.slot_cache.cache import HostCache
from streamd.tiers.uploads import Uploads

log = logging.getLogger(__name__)

# So long after the last copy we do not go to sleep: waking up takes longer than a fetch should.
LINGER_MS = 2.0

OpenGpu = Callable[[int], GpuDevice]


def open_gpu(
    experts: ExpertIndex,
    residents: Residents,
    wanted: bool | None,
    ordinal: int,
    budget_bytes: int | None,
    reserve_bytes: int,
    open_device: OpenGpu = CudaDevice,
    vram_bytes: int | None = None,
) -> tuple[GpuDevice, GpuPlan] | None:
    """The device and what fits on it; None where no GPU is wanted, or none will do for `auto`.

    wanted: True, False, or None for `auto`. Raises why a wanted one will not do: GpuError,
    ConfigError, PlanError; and GpuNotShared for `auto` too, where clients may do without us.
    """
    if wanted is False:
        return None
    device = None
    try:
        device = open_device(ordinal)
        try:
            plan = plan_gpu(
                experts,
                budget_bytes,
                residents,
                device.memory_bytes()[0],
                device.granularity_bytes,
                reserve_bytes,
                vram_bytes,
            )
        except BaseException:
            device.close()
            raise
    except StreamError as error:
        if wanted or isinstance(error, GpuNotShared):
            raise
        # A machine without a GPU need not hear of it at every start.
        log.log(logging.DEBUG if device is None else logging.INFO, "no GPU tier: %s", error)
        return None
    return device, plan


class GpuTier:
    """Its allocations and its copies belong to `stack`; the device is the caller's.

    cache: of the GPU's slots. host, host_layout, host_address: of the tier it uploads from.
    upload_pace: bytes a second of a bus that is stood in for, 0 for the machine's own.
    """

    def __init__(
        self,
        device: GpuDevice,
        plan: GpuPlan,
        experts: ExpertIndex,
        host: Scheduler,
        host_layout: ArenaLayout,
        host_address: int,
        barrier: Callable[[], None],
        now_ms: Callable[[], float],
        stack: ExitStack,
        warm: bool = True,
        upload_pace: float = 0.0,
    ) -> None:
        self._now_ms = now_ms
        self._busy_until_ms = 0.0
        self.device = device
        self._copies: CopyQueue = PacedCopies(device, upload_pace) if upload_pace else device
        self.plan = plan
        self.arena = device.allocate(plan.layout.total_bytes)
        stack.callback(self.arena.close)
        self.resident = device.allocate(plan.resident_bytes)
        stack.callback(self.resident.close)
        self.source = HostSource(device, host_layout, host_address, experts)
        self.uploads = Uploads(
            self._copies, host.cache, self.source, plan.layout, self.arena.address
        )
        stack.callback(self.uploads.close)
        self.cache = HostCache(
            host.cache.table,
            experts.layer_class.tolist(),
            class_slots(plan.layout, plan.wave_experts, experts),
            barrier,
            now_ms,
            GPU_TIER,
        )
        self.scheduler = Scheduler(
            self.cache, self.uploads, layer_slab_bytes(experts), now_ms, host, warm
        )

    def is_busy(self) -> bool:
        """Whether copies are under way, or were a moment ago: the next layer asks soon then."""
        now_ms = self._now_ms()
        if self._copies.copying or self.uploads.eager:
            self._busy_until_ms = now_ms + LINGER_MS
        return now_ms < self._busy_until_ms

    def upload_resident(
        self, target: ResidentLayout, source: ResidentLayout, source_address: int
    ) -> None:
        """Copy the tensors of `target` from host memory, and wait for them. GpuError."""
        offsets = {placed.tensor.name: placed.payload_offset for placed in source.tensors}
        copies = [
            Copy(
                self.resident.address + placed.payload_offset,
                source_address + offsets[placed.tensor.name],
                placed.tensor.byte_count,
            )
            for placed in target.tensors
            if placed.tensor.byte_count
        ]
        self.device.submit(0, copies)
        self.device.drain()
        for _, error in self.device.reap():
            if error is not None:
                raise error
