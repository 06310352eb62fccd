"""Making a client with GPU slots of its own: planned as a daemon plans, then filled."""

from infer.daemon.client import SlotClient
from infer.uploads.bounce import BounceRing
from infer.uploads.client import UploadingClient
from infer.uploads.device import UploadDevice
from infer.uploads.own_memory import OwnMemory
from shared.daemon_options import DaemonOptions
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from shared.gpu_plan import KERNEL_BYTES, GpuPlan, client_reserve, gpu_residents, plan_gpu

# Of torch's allocator.
GRANULARITY_BYTES = 2 << 20


def plan_own(
    index: GgufIndex, experts: ExpertIndex, options: DaemonOptions, free_bytes: int
) -> GpuPlan:
    """free_bytes: beside our context. PlanError where the least does not fit."""
    return plan_gpu(
        experts,
        options.gpu_cache,
        gpu_residents(options, index),
        free_bytes,
        GRANULARITY_BYTES,
        client_reserve(options, index),
        options.vram,
        KERNEL_BYTES,
    )


def open_uploading(
    host: SlotClient, device: UploadDevice, plan: GpuPlan, index: GgufIndex, is_limited: bool
) -> UploadingClient:
    """Over `host`, which stays the caller's where this fails: GpuError."""
    own = OwnMemory(device, plan, host.experts, is_limited)
    bounce = BounceRing(device)
    own.upload_resident(index, host.mapping, bounce)
    return UploadingClient(host, device, own, bounce)
