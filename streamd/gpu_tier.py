"""The GPU tier: slots and resident tensors in the memory of one device, shared by descriptor."""

import logging
from collections.abc import Callable
from contextlib import ExitStack

from shared.arena import ArenaLayout
from shared.errors import StreamError
from shared.experts import ExpertIndex
from shared.resident import ResidentLayout
from shared.wire import GPU_TIER
from streamd.cache import HostCache
from streamd.gpu.cuda_device import CudaDevice
from streamd.gpu.device import Copy, GpuDevice
from streamd.gpu.host_source import HostSource
from streamd.gpu_plan import GpuPlan, plan_gpu
from streamd.plan import class_slots
from streamd.uploads import Uploads

log = logging.getLogger(__name__)

OpenGpu = Callable[[int], GpuDevice]


def open_gpu(
    experts: ExpertIndex,
    resident_bytes: int,
    wanted: bool | None,
    ordinal: int,
    budget_bytes: int | None,
    reserve_bytes: int,
    open_device: OpenGpu = CudaDevice,
) -> tuple[GpuDevice, GpuPlan] | None:
    """The device and what fits on it; None where no GPU is wanted, or none will do for `auto`.

    wanted: True, False, or None for `auto`. Raises why a wanted one will not do: GpuError,
    ConfigError, PlanError.
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
                resident_bytes,
                device.memory_bytes()[0],
                device.granularity_bytes,
                reserve_bytes,
            )
        except BaseException:
            device.close()
            raise
    except StreamError as error:
        if wanted:
            raise
        # A machine without a GPU need not hear of it at every start.
        log.log(logging.DEBUG if device is None else logging.INFO, "no GPU tier: %s", error)
        return None
    return device, plan


class GpuTier:
    """Its allocations and its copies belong to `stack`; the device is the caller's.

    cache: of the GPU's slots. host_cache, host_layout, host_address: of the tier it uploads from.
    """

    def __init__(
        self,
        device: GpuDevice,
        plan: GpuPlan,
        experts: ExpertIndex,
        host_cache: HostCache,
        host_layout: ArenaLayout,
        host_address: int,
        barrier: Callable[[], None],
        now_ms: Callable[[], float],
        stack: ExitStack,
    ) -> None:
        self.device = device
        self.plan = plan
        self.arena = device.allocate(plan.layout.total_bytes)
        stack.callback(self.arena.close)
        self.resident = device.allocate(plan.resident_bytes)
        stack.callback(self.resident.close)
        source = HostSource(device, host_layout, host_address, experts)
        self.uploads = Uploads(device, host_cache, source, plan.layout, self.arena.address)
        stack.callback(self.uploads.close)
        self.cache = HostCache(
            host_cache.table,
            experts.layer_class.tolist(),
            class_slots(plan.layout, plan.wave_experts, experts),
            barrier,
            now_ms,
            GPU_TIER,
        )

    @property
    def copying(self) -> bool:
        return self.device.copying

    def step(self) -> set[int]:
        """One step of the protocol; its grants are uploads then. Clients to ring."""
        step = self.cache.step(self.uploads.room)
        for grant in step.grants:
            self.uploads.submit(grant)
        return step.ring

    def upload_resident(
        self, target: ResidentLayout, source: ResidentLayout, source_address: int
    ) -> None:
        """Copy all resident tensors from host memory, and wait for them. GpuError."""
        copies = [
            Copy(
                self.resident.address + there.payload_offset,
                source_address + here.payload_offset,
                here.tensor.byte_count,
            )
            for there, here in zip(target.tensors, source.tensors, strict=True)
            if here.tensor.byte_count
        ]
        self.device.submit(0, copies)
        self.device.drain()
        for _, error in self.device.reap():
            if error is not None:
                raise error
