"""Whether there is a compute lane, and what it is made of."""

import logging

import torch

from infer.ahead.prefetch_trial import Trial
from infer.config import LANE_AUTO, LANE_OFF, ModelConfig
from infer.daemon.client import SlotClient
from infer.kernels.scratch import KernelBounds
from infer.lane.compute_lane import ComputeLane
from infer.model import Model
from infer.uploads.client import UploadingClient
from shared.errors import ConfigError, DaemonBusy
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from shared.wire import HOST_TIER

log = logging.getLogger(__name__)

# For the daemon's loop, which the bus depends on, and for what it reads with.
SPARED_PROCESSORS = 2
# The prefetch's trial has blocks of half the length, so that each block here has both of its kinds.
FIRST_TRIAL_TOKENS, BLOCK_TOKENS, BLOCK_COUNT = 32, 16, 6


def open_lane(
    name: str,
    client: SlotClient | UploadingClient,
    index: GgufIndex,
    experts: ExpertIndex,
    model: Model,
    bounds: KernelBounds,
    config: ModelConfig,
    device: torch.device,
) -> ComputeLane | None:
    """Attached to the daemon `name` a second time; None where --compute-lane leaves it out.

    client: of the GPU; what the lane waits for it has waited for. bounds: of kernels for one token.

    Where it is `on` and cannot be: ConfigError, or what the daemon says: PlanError, DaemonBusy.
    """
    if config.compute_lane == LANE_OFF:
        return None
    try:
        _check(model, config, device, client)
        lane = _open(name, index, experts, model, bounds, config)
    except (ConfigError, DaemonBusy) as error:
        if config.compute_lane != LANE_AUTO:
            raise
        log.info("no compute lane: %s", error)
        return None
    lane.host.waits = client.waits
    return lane


def _check(
    model: Model,
    config: ModelConfig,
    device: torch.device,
    client: SlotClient | UploadingClient,
) -> None:
    remedy = f"leave --compute-lane out, or give {LANE_AUTO}"
    if device.type != "cuda":
        raise ConfigError(f"--compute-lane: the model runs on {device} as it is", remedy)
    if config.exact:
        raise ConfigError(
            "--compute-lane and --exact: which experts the CPU computes is a matter of time, and so"
            " the last bits would be",
            "leave one of the two out",
        )
    if isinstance(client, UploadingClient):
        # Its own section of the host tier would be open while the lane waits for reads in another.
        raise ConfigError(
            "--compute-lane: the daemon cannot share the GPU's memory, so slots there are this"
            " process's own",
            f"{remedy}; `streamd doctor` says what keeps the memory from being shared",
        )
    if not model.recordable:
        raise ConfigError("--compute-lane: the steps of this model are not recorded", remedy)


def _open(
    name: str,
    index: GgufIndex,
    experts: ExpertIndex,
    model: Model,
    bounds: KernelBounds,
    config: ModelConfig,
) -> ComputeLane:
    # They compile or load loops.
    from infer.kernels.ggml_cpu import GgmlKernels  # noqa: PLC0415
    from infer.kernels.thread_team import available_processors  # noqa: PLC0415

    threads = config.threads or max(1, available_processors() - SPARED_PROCESSORS)
    kernels = GgmlKernels(bounds, threads)
    is_tried = config.compute_lane == LANE_AUTO
    trial = Trial(False, FIRST_TRIAL_TOKENS, BLOCK_TOKENS, BLOCK_COUNT) if is_tried else None
    host = SlotClient(name, index, experts, HOST_TIER)
    return ComputeLane(host, kernels, model.shape.width, trial, pinned=True)
