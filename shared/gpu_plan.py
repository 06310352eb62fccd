"""What fits on the GPU: slots of each size class, before anything is allocated.

free   = [ resident tensors | expert slots | a client's context | its KV cache and activations
           | its two buffers, where layers are streamed ]
--vram = [ the daemon's context | what else would be free ]
"""

from dataclasses import dataclass

from shared.arena import GPU_ALIGN_BYTES, ArenaLayout, round_up
from shared.client_memory import check_context, client_bytes
from shared.daemon_options import DaemonOptions
from shared.errors import PlanError
from shared.experts import ExpertIndex, resident_tensors
from shared.gguf_index import GgufIndex
from shared.layer_choice import (
    NOTHING_STREAMED,
    SLOT_FLOORS,
    LayerChoice,
    Residents,
    choose_layers,
)
from shared.resident import gpu_resident_layout
from shared.sizes import at_least, at_most, mb
from shared.slot_plan import Demand, place
from shared.streamed import streamable_layers

# A client's context: 527 MiB bare on an H200, and its kernels. The daemon's own is there already
# when what is free is looked up.
CLIENT_CONTEXT_BYTES = 640 << 20
# The daemon's own, which loads no kernels: bare, on an H200; less on smaller cards.
DAEMON_CONTEXT_BYTES = 527 << 20
# What a context grows by once it has kernels.
KERNEL_BYTES = CLIENT_CONTEXT_BYTES - DAEMON_CONTEXT_BYTES


@dataclass(frozen=True)
class GpuPlan:
    """The GPU tier. `taken_bytes`: of the daemon's two allocations together.

    resident_bytes: of tensors in GPU memory, streamed layers left out.
    """

    layout: ArenaLayout
    wave_experts: tuple[int, ...]
    budget_bytes: int
    floor_bytes: int
    full_bytes: int
    resident_bytes: int
    reserve_bytes: int
    free_bytes: int
    taken_bytes: int
    streamed: LayerChoice = NOTHING_STREAMED


def plan_gpu(
    experts: ExpertIndex,
    budget_bytes: int | None,
    residents: Residents,
    free_bytes: int,
    granularity_bytes: int,
    reserve_bytes: int,
    vram_bytes: int | None = None,
    context_bytes: int = CLIENT_CONTEXT_BYTES,
) -> GpuPlan:
    """Slots for a budget in bytes (None: all that is free), and the layers to be streamed.

    free_bytes: with the planner's own context already there; reserve_bytes: left to the clients
    besides a context, for which there are context_bytes; vram_bytes: what daemon and one client may
    take together, if that is less than what is free. A client that plans for itself is both, and
    needs KERNEL_BYTES more. The arena, rounded up to the granularity, never exceeds the budget.
    Raises PlanError below the floor or beyond the memory there is.
    """
    if vram_bytes is not None:
        free_bytes = min(free_bytes, max(0, vram_bytes - DAEMON_CONTEXT_BYTES))
    demand = Demand.of(experts, GPU_ALIGN_BYTES)
    floor_bytes = round_up(demand.floor_bytes, granularity_bytes)
    full_bytes = round_up(demand.full_bytes, granularity_bytes)

    def other_bytes(choice: LayerChoice) -> tuple[int, int]:
        """Of resident tensors, and of a client."""
        resident_bytes = round_up(residents.total_bytes - choice.streamed_bytes, granularity_bytes)
        return resident_bytes, context_bytes + reserve_bytes + choice.buffers_bytes

    def fits(choice: LayerChoice) -> bool:
        floors = SLOT_FLOORS if choice.layers else 1
        slots_bytes = min(full_bytes, budget_bytes or floors * floor_bytes)
        return sum(other_bytes(choice)) + slots_bytes <= free_bytes

    streamed = choose_layers(residents, fits)
    resident_bytes, kept_bytes = other_bytes(streamed)
    room_bytes = free_bytes - resident_bytes - kept_bytes
    chosen = min(full_bytes, room_bytes if budget_bytes is None else budget_bytes)
    chosen -= chosen % granularity_bytes
    if min(chosen, room_bytes) < demand.floor_bytes:
        if vram_bytes is not None and vram_bytes - DAEMON_CONTEXT_BYTES <= free_bytes:
            raise _vram_error(vram_bytes, resident_bytes, kept_bytes, floor_bytes)
        cache_bytes = max(0, min(chosen, room_bytes))
        raise _cache_error(cache_bytes, floor_bytes, free_bytes, resident_bytes, kept_bytes)
    if chosen > room_bytes:
        raise PlanError(
            f"a GPU cache of {mb(chosen)}, {mb(resident_bytes)} of resident tensors and"
            f" {mb(kept_bytes)} for a client do not fit the {mb(free_bytes)} that are free",
            f"give --gpu-cache {at_most(room_bytes)} or less, or a smaller --gpu-reserve or"
            " --gpu-resident",
        )
    layout, waves = place(experts, demand, chosen)
    taken_bytes = round_up(layout.total_bytes, granularity_bytes) + resident_bytes
    return GpuPlan(
        layout,
        waves,
        chosen,
        floor_bytes,
        full_bytes,
        resident_bytes,
        reserve_bytes,
        free_bytes,
        taken_bytes,
        streamed,
    )


def gpu_residents(options: DaemonOptions, index: GgufIndex) -> Residents:
    total_bytes = gpu_resident_layout(resident_tensors(index)).total_bytes
    layers = streamable_layers(index)
    layer_bytes = {number: layout.total_bytes for number, layout in layers.items()}
    return Residents(total_bytes, layer_bytes, options.gpu_resident)


def client_reserve(options: DaemonOptions, index: GgufIndex) -> int:
    """Bytes of GPU memory left to the clients besides a context; ConfigError for their --ctx."""
    check_context(index, options.ctx)
    if options.gpu_reserve is not None:
        return options.gpu_reserve
    return client_bytes(index, options.ctx, options.chunk)


def _cache_error(
    cache_bytes: int, floor_bytes: int, free_bytes: int, resident_bytes: int, kept_bytes: int
) -> PlanError:
    return PlanError(
        f"a GPU cache of {mb(cache_bytes)} cannot hold the {mb(floor_bytes)} this model needs at"
        f" least; of {mb(free_bytes)} that are free, {mb(resident_bytes)} are for resident tensors"
        f" and {mb(kept_bytes)} for a client",
        f"give --gpu-cache {at_least(floor_bytes)} or more, a smaller --gpu-reserve or"
        " --gpu-resident, or end other programs on the GPU; --device cpu does without it",
    )


def _vram_error(
    vram_bytes: int, resident_bytes: int, kept_bytes: int, floor_bytes: int
) -> PlanError:
    needed_bytes = DAEMON_CONTEXT_BYTES + resident_bytes + kept_bytes + floor_bytes
    return PlanError(
        f"--vram {mb(vram_bytes)} is less than the {mb(needed_bytes)} this model needs at least:"
        f" the daemon's context {mb(DAEMON_CONTEXT_BYTES)}, resident tensors"
        f" {mb(resident_bytes)}, a client {mb(kept_bytes)}, slots {mb(floor_bytes)}",
        f"give --vram {at_least(needed_bytes)} or more, a smaller --ctx or --chunk, or --device"
        " cpu",
    )
