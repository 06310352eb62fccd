"""What fits on the GPU: slots of each size class, before anything is allocated.

free   = [ resident tensors | expert slots | a client's context | its KV cache and activations
           | its two buffers, where layers are streamed ]
--vram = [ the daemon's context | what else would be free ]
"""

from dataclasses import dataclass

from shared.arena import GPU_ALIGN_BYTES, ArenaLayout, round_up
from shared.errors import PlanError
from shared.experts import ExpertIndex
from streamd.planning.layer_choice import (
    NOTHING_STREAMED,
    SLOT_FLOORS,
    LayerChoice,
    Residents,
    choose_layers,
)
from streamd.planning.plan import Demand, mib, place

# A client's context: 527 MiB bare on an H200, and its kernels. The daemon's own is there already
# when what is free is looked up.
CLIENT_CONTEXT_BYTES = 640 << 20
# The daemon's own, which loads no kernels: bare, on an H200; less on smaller cards.
DAEMON_CONTEXT_BYTES = 527 << 20


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
) -> GpuPlan:
    """Slots for a budget in bytes (None: all that is free), and the layers to be streamed.

    free_bytes: with the daemon's own context already there; reserve_bytes: left to the clients
    besides a context; vram_bytes: what daemon and one client may take together, if that is less
    than what is free. The arena, rounded up to the granularity, is never more than the budget.
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
        return resident_bytes, CLIENT_CONTEXT_BYTES + reserve_bytes + choice.buffers_bytes

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
        raise PlanError(
            f"a GPU cache of {mib(max(0, min(chosen, room_bytes)))} cannot hold the"
            f" {mib(floor_bytes)} this model needs at least; of {mib(free_bytes)} that are free,"
            f" {mib(resident_bytes)} are for resident tensors and {mib(kept_bytes)} for a client",
            f"give --gpu-cache {floor_bytes >> 20}M or more, a smaller --gpu-reserve or"
            " --gpu-resident, or end other programs on the GPU; --gpu-cache 0 does without it",
        )
    if chosen > room_bytes:
        raise PlanError(
            f"a GPU cache of {mib(chosen)}, {mib(resident_bytes)} of resident tensors and"
            f" {mib(kept_bytes)} for a client do not fit the {mib(free_bytes)} that are free",
            f"give --gpu-cache {max(0, room_bytes) >> 20}M or less, or a smaller --gpu-reserve or"
            " --gpu-resident",
        )
    layout, waves = place(experts, demand, chosen)
    taken_bytes = round_up(layout.total_bytes, granularity_bytes) + resident_bytes
    return GpuPlan(
        layout,
        waves,
        chosen,
        demand.floor_bytes,
        full_bytes,
        resident_bytes,
        reserve_bytes,
        free_bytes,
        taken_bytes,
        streamed,
    )


def _vram_error(
    vram_bytes: int, resident_bytes: int, kept_bytes: int, floor_bytes: int
) -> PlanError:
    needed_bytes = DAEMON_CONTEXT_BYTES + resident_bytes + kept_bytes + floor_bytes
    return PlanError(
        f"--vram {mib(vram_bytes)} is less than the {mib(needed_bytes)} this model needs at least:"
        f" the daemon's context {mib(DAEMON_CONTEXT_BYTES)}, resident tensors"
        f" {mib(resident_bytes)}, a client {mib(kept_bytes)}, slots {mib(floor_bytes)}",
        f"give --vram {-(-needed_bytes // 2**20)}M or more, a smaller --ctx or --chunk, or --device"
        " cpu",
    )
