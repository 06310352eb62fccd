"""Which of a daemon's tiers this process computes from, or that it keeps GPU slots of its own."""

import logging

import torch

from infer.daemon.client import SlotClient
from infer.uploads.client import UploadingClient
from infer.uploads.open_client import open_uploading, plan_own
from shared.daemon_options import CPU, DaemonOptions
from shared.errors import GpuError, GpuNotShared, NoGpuTier, PlanError, StreamError
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from shared.sizes import mb
from shared.wire import GPU_TIER, HOST_TIER

log = logging.getLogger(__name__)


def attach(
    name: str, index: GgufIndex, experts: ExpertIndex, options: DaemonOptions
) -> SlotClient | UploadingClient:
    """options.device: auto, cpu or cuda:N. `auto` takes the GPU if both sides have it, or if the
    daemon would keep slots there but cannot share them. Raises what keeps all of that from us:
    GpuError, PlanError, DaemonBusy, DaemonLost, ModelChanged, ProtocolMismatch."""
    device = options.device
    why_not: StreamError | None = None
    named_gpu = device not in ("auto", CPU)
    if named_gpu and not torch.cuda.is_available():
        raise GpuError(
            f"--device {device}: torch sees no GPU here",
            "install torch with CUDA and a driver, or leave --device out",
        )
    if named_gpu or (device == "auto" and _usable_gpu()):
        try:
            return _attach_to_gpu(name, index, experts, options)
        except (GpuError, PlanError) as error:  # none there, or no room for one more client
            if named_gpu:
                raise
            log.info("the CPU computes: %s", error)
            why_not = error
    return _attach_to_cpu(name, index, experts, why_not)


def _attach_to_cpu(
    name: str, index: GgufIndex, experts: ExpertIndex, why_not: StreamError | None
) -> SlotClient:
    """why_not: what kept us from the GPU, if it was tried."""
    client = SlotClient(name, index, experts, HOST_TIER)
    if client.mapping.attached.resident_bytes:
        return client
    client.close()
    cause = (
        f"the daemon {name!r} keeps the resident tensors in GPU memory alone: no CPU can compute"
    )
    if why_not is None:
        raise GpuError(cause, "compute on its GPU, or start it with --cpu-clients on")
    raise GpuError(
        f"{cause}, and the GPU cannot be had: {why_not.message}",
        "; or ".join(filter(None, (why_not.remedy, "start the daemon with --cpu-clients on"))),
    )


def _attach_to_gpu(
    name: str, index: GgufIndex, experts: ExpertIndex, options: DaemonOptions
) -> SlotClient | UploadingClient:
    try:
        return SlotClient(name, index, experts, GPU_TIER, _settle)
    except NoGpuTier as refusal:
        if options.device == "auto" and not isinstance(refusal, GpuNotShared):
            raise
        return _with_own_slots(name, index, experts, options, refusal)


def _with_own_slots(
    name: str, index: GgufIndex, experts: ExpertIndex, options: DaemonOptions, why: NoGpuTier
) -> UploadingClient:
    from infer.uploads.cuda_device import CudaUploadDevice  # noqa: PLC0415 - needs a driver

    device = CudaUploadDevice(options.gpu_ordinal)
    plan = plan_own(index, experts, options, device.free_bytes())
    log.warning(
        "%s: infer keeps %s of slots and %s of resident tensors in GPU memory for itself",
        why.message,
        mb(plan.layout.total_bytes),
        mb(plan.resident_bytes),
    )
    host = SlotClient(name, index, experts, HOST_TIER)
    try:
        return open_uploading(host, device, plan, index, options.vram is not None)
    except BaseException:
        host.close()
        raise


def _settle(device: str) -> None:
    """Wait for what is queued for computing; copies of streamed layers go on."""
    torch.cuda.current_stream(torch.device(device)).synchronize()


def _usable_gpu() -> bool:
    """Whether our kernels run on the GPU that torch sees (compute capability 7.5)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (7, 5)
