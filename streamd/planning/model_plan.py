"""`streamd plan`: where everything would lie, how often it would be hit, how fast that can be.

Nothing is allocated and nothing is read but the header, so a file without its tensors' contents
will do. What a described machine has (--vram, --ram) takes the place of what this one has.
"""

import logging
import math
import os
import resource
from contextlib import ExitStack
from dataclasses import dataclass

from shared.arena import ArenaLayout, round_up
from shared.client_memory import planned_context
from shared.daemon_memory import process_bytes
from shared.errors import GpuNotShared, PlanError
from shared.experts import ExpertIndex, resident_tensors
from shared.free_memory import available_memory_bytes
from shared.gguf_index import GgufIndex, TensorInfo
from shared.gpu_plan import GpuPlan, client_reserve, gpu_residents, plan_gpu
from shared.mtp import open_served
from shared.sizes import at_least, at_most, mb, parse_size
from shared.slot_plan import Demand
from streamd.commands.io_best import load_best, reads_of
from streamd.config import StreamdConfig
from streamd.gpu.cuda_device import CudaDevice
from streamd.planning.forecast import (
    Bound,
    Budget,
    Misses,
    Rates,
    bound_of,
    misses_by_table,
    misses_of_trace,
)
from streamd.planning.plan import AUTO_SHARE, HostPlan, plan_host
from streamd.planning.plan_options import MachineOptions
from streamd.readers.engine import DEPTH_MAX
from streamd.records.trace_replay import read_trace
from streamd.served_model import find_gpu, open_files, read_align
from streamd.tiers.resident import host_residents
from streamd.tiers.uploads import LANE_COUNT

log = logging.getLogger(__name__)

# Of a described machine's RAM, for the system and the processes themselves, the daemon's too.
SYSTEM_BYTES = 2 << 30
# What cuMemCreate rounds to on every card so far.
GPU_GRANULARITY_BYTES = 2 << 20
EMBEDDING = "token_embd.weight"


@dataclass(frozen=True)
class ModelPlan:
    """gpu, gpu_name: None and "" where there is no GPU tier, `gpu_refusal` says why if one was
    described. host_resident_bytes: of resident tensors in RAM. context: tokens that the GPU's
    reserve is for. pinnable_bytes: what may be pinned for reads (RLIMIT_MEMLOCK); None where there
    is no limit, or the machine is another one. is_disk_measured: whether the disk's rate is what
    bench-io measured on this machine."""

    config: StreamdConfig
    experts: ExpertIndex
    host: HostPlan
    resident_bytes: int
    host_resident_bytes: int
    gpu: GpuPlan | None
    gpu_name: str
    gpu_refusal: str
    context: int
    token_bytes: float
    misses: Misses
    bound: Bound
    rates: Rates
    is_disk_measured: bool
    pinnable_bytes: int | None


def plan_model(config: StreamdConfig, machine: MachineOptions) -> ModelPlan:
    """Raises what opening the file and planning raise."""
    index = open_served(config.model, config.mtp, partial=True)
    experts = ExpertIndex.from_gguf(index)
    tensors = resident_tensors(index)
    gpu, gpu_name, refusal = _plan_gpu(config, index, experts)
    with ExitStack() as stack:
        # As where it is served: a client uploads from the slots itself where no GPU is shared.
        on_gpu = gpu is not None or bool(refusal)
        align = read_align(open_files(index, stack), on_gpu)
    in_ram = host_residents(index, align, gpu, config.cpu_clients)
    lane_count = LANE_COUNT if gpu is not None else 0
    if machine.ram is not None:
        _check_ram(machine.ram, config.host_cache, in_ram.held_bytes, experts, align, lane_count)
    own_bytes = process_bytes(gpu is not None, experts.expert_count)
    host = plan_host(
        experts,
        align,
        config.host_cache,
        in_ram.held_bytes,
        own_bytes,
        _free_ram(machine, own_bytes),
        lane_count,
    )
    misses = _misses(config, experts, host, gpu)
    rates, is_disk_measured = _rates(config, machine, experts)
    token_bytes = float(experts.top_k * sum(len(c.layers) * c.slab_bytes for c in experts.classes))
    bound = bound_of(
        misses,
        token_bytes,
        _read_resident_bytes(tensors),
        rates,
        gpu is not None,
        gpu.streamed.streamed_bytes if gpu is not None else 0,
    )
    return ModelPlan(
        config,
        experts,
        host,
        in_ram.total_bytes,
        in_ram.held_bytes,
        gpu,
        gpu_name,
        refusal,
        planned_context(index, config.ctx),
        token_bytes,
        misses,
        bound,
        rates,
        is_disk_measured,
        None if machine.ram is not None else _pinnable_bytes(),
    )


def _plan_gpu(
    config: StreamdConfig, index: GgufIndex, experts: ExpertIndex
) -> tuple[GpuPlan | None, str, str]:
    """The plan, the device's name, and why there is none though one was described."""
    if config.vram is None or config.wants_gpu is False:
        try:
            found = find_gpu(config, index, experts, CudaDevice)
        except GpuNotShared as error:
            return None, "", str(error)
        if found is None:
            return None, "", ""
        found[0].close()
        return found[1], found[0].name, ""
    try:
        plan = plan_gpu(
            experts,
            config.gpu_cache,
            gpu_residents(config, index),
            config.vram,
            GPU_GRANULARITY_BYTES,
            client_reserve(config, index),
            config.vram,
        )
    except PlanError as error:
        return None, "", str(error)
    return plan, "as described", ""


def _check_ram(
    ram_bytes: int,
    cache_bytes: int | None,
    resident_bytes: int,
    experts: ExpertIndex,
    align: int,
    lane_count: int,
) -> None:
    """PlanError where a described machine is too small; cache_bytes: --host-cache, None: auto.

    What --host-cache says is too small by itself is left to the plan to refuse.
    """
    demand = Demand.of(experts, align, lane_count)
    if cache_bytes is None:
        slots_bytes, remark = demand.floor_bytes, f"{AUTO_SHARE:.0%} of what is left then"
        cache_room_bytes = math.ceil(slots_bytes / AUTO_SHARE)
    else:
        slots_bytes, remark = min(cache_bytes, demand.full_bytes), "--host-cache"
        cache_room_bytes = slots_bytes
    needed_bytes = SYSTEM_BYTES + resident_bytes + cache_room_bytes
    if ram_bytes >= needed_bytes or slots_bytes < demand.floor_bytes:
        return
    room_bytes = max(0, ram_bytes - SYSTEM_BYTES - resident_bytes)
    fits_less = parse_size(at_most(room_bytes)) >= demand.floor_bytes
    raise PlanError(
        f"--ram {mb(ram_bytes)} is less than the {mb(needed_bytes)} this model needs at"
        f" least: the system and the processes {mb(SYSTEM_BYTES)}, resident tensors"
        f" {mb(resident_bytes)}, slots {mb(slots_bytes)} ({remark})",
        f"give --ram {at_least(needed_bytes)} or more"
        + (f", or --host-cache {at_most(room_bytes)}" if fits_less else ""),
    )


def _free_ram(machine: MachineOptions, own_bytes: int) -> int:
    """What the daemon can have, own_bytes of its process among it."""
    if machine.ram is None:
        return available_memory_bytes()
    return max(0, machine.ram - SYSTEM_BYTES) + own_bytes


def _pinnable_bytes() -> int | None:
    """Root is under no limit; others' is the process's, beyond which slots are read unpinned."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else soft


def _misses(
    config: StreamdConfig, experts: ExpertIndex, host: HostPlan, gpu: GpuPlan | None
) -> Misses:
    budget = Budget(
        experts.layer_class.tolist(),
        experts.n_experts,
        experts.top_k,
        _useful_slots(experts, host.layout, host.wave_experts if gpu is None else None),
        None if gpu is None else _useful_slots(experts, gpu.layout, gpu.wave_experts),
    )
    if config.trace is None:
        return misses_by_table(budget)
    return misses_of_trace(read_trace(config.trace), budget, str(config.trace))


def _useful_slots(
    experts: ExpertIndex, layout: ArenaLayout, waves: tuple[int, ...] | None
) -> list[int]:
    """Slots of each class but for the reserve: a client's wave, or (None) one a lane of uploads."""
    reserves = waves or [LANE_COUNT] * len(layout.class_slot_counts)
    return [
        count if count == c.expert_count else max(experts.top_k, count - reserve)
        for count, c, reserve in zip(
            layout.class_slot_counts, experts.classes, reserves, strict=True
        )
    ]


def _rates(
    config: StreamdConfig, machine: MachineOptions, experts: ExpertIndex
) -> tuple[Rates, bool]:
    """And whether the disk's is what bench-io measured here, as it is unless it is described."""
    disk: float | None = machine.disk or config.io.paced_bytes_per_s
    best = load_best(reads_of(config.model, experts), DEPTH_MAX) if disk is None else None
    if best is not None:
        disk = best.mb_s * 1e6
    rates = Rates(disk, machine.pcie or config.upload_pace or None, machine.bandwidth)
    return rates, best is not None


def _read_resident_bytes(tensors: list[TensorInfo]) -> float:
    """Of a token: all tensors but the embedding, of which it reads a row, unless that is the
    output matrix too."""
    names = {tensor.name for tensor in tensors}
    tied = "output.weight" not in names
    return float(sum(t.byte_count for t in tensors if tied or t.name != EMBEDDING))


def slots_bytes(plan: GpuPlan) -> int:
    """What the GPU's slots take once they are allocated."""
    return round_up(plan.layout.total_bytes, GPU_GRANULARITY_BYTES)
