"""Which of a daemon's tiers this process computes from."""

import logging

import torch

from infer.daemon.client import SlotClient
from shared.daemon_options import CPU
from shared.errors import GpuError, PlanError
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from shared.wire import GPU_TIER, HOST_TIER

log = logging.getLogger(__name__)


def attach(name: str, index: GgufIndex, experts: ExpertIndex, device: str) -> SlotClient:
    """device: auto, cpu or cuda:N. `auto` takes the GPU if both sides have it."""
    named_gpu = device not in ("auto", CPU)
    if named_gpu and not torch.cuda.is_available():
        raise GpuError(
            f"--device {device}: torch sees no GPU here",
            "install torch with CUDA and a driver, or leave --device out",
        )
    if named_gpu or (device == "auto" and _usable_gpu()):
        try:
            return SlotClient(name, index, experts, GPU_TIER, _settle)
        except (GpuError, PlanError) as error:  # none there, or no room for one more client
            if named_gpu:
                raise
            log.info("the CPU computes: %s", error)
    return SlotClient(name, index, experts, HOST_TIER)


def _settle(device: str) -> None:
    """Wait for what is queued for computing; copies of streamed layers go on."""
    torch.cuda.current_stream(torch.device(device)).synchronize()


def _usable_gpu() -> bool:
    """Whether our kernels run on the GPU that torch sees (compute capability 7.5)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (7, 5)
