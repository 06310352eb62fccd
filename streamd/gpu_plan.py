"""What fits on the GPU: slots of each size class, before anything is allocated.

free = [ resident tensors | expert slots | a client's context | its KV cache and activations ]
"""

from dataclasses import dataclass

from shared.arena import GPU_ALIGN_BYTES, ArenaLayout, round_up
from shared.errors import PlanError
from shared.experts import ExpertIndex
from streamd.plan import Demand, mib, place

# A client's context: 527 MiB bare on an H200, and its kernels. The daemon's own is there already
# when what is free is looked up.
CLIENT_CONTEXT_BYTES = 640 << 20


@dataclass(frozen=True)
class GpuPlan:
    """The GPU tier. `taken_bytes`: of the daemon's two allocations together."""

    layout: ArenaLayout
    wave_experts: tuple[int, ...]
    budget_bytes: int
    floor_bytes: int
    full_bytes: int
    resident_bytes: int
    reserve_bytes: int
    free_bytes: int
    taken_bytes: int


def plan_gpu(
    experts: ExpertIndex,
    budget_bytes: int | None,
    resident_bytes: int,
    free_bytes: int,
    granularity_bytes: int,
    reserve_bytes: int,
) -> GpuPlan:
    """Slots for a budget in bytes (None: all that is free).

    free_bytes: with the daemon's own context already there; reserve_bytes: left to the clients
    besides a context. The arena, rounded up to the granularity, is never more than the budget.
    Raises PlanError below the floor or beyond the memory there is.
    """
    demand = Demand.of(experts, GPU_ALIGN_BYTES)
    resident_bytes = round_up(resident_bytes, granularity_bytes)
    kept_bytes = CLIENT_CONTEXT_BYTES + reserve_bytes
    room_bytes = free_bytes - resident_bytes - kept_bytes
    full_bytes = round_up(demand.full_bytes, granularity_bytes)
    chosen = min(full_bytes, room_bytes if budget_bytes is None else budget_bytes)
    chosen -= chosen % granularity_bytes
    if min(chosen, room_bytes) < demand.floor_bytes:
        floor_bytes = round_up(demand.floor_bytes, granularity_bytes)
        raise PlanError(
            f"a GPU cache of {mib(max(0, min(chosen, room_bytes)))} cannot hold the"
            f" {mib(floor_bytes)} this model needs at least; of {mib(free_bytes)} that are free,"
            f" {mib(resident_bytes)} are for resident tensors and {mib(kept_bytes)} for a client",
            f"give --gpu-cache {floor_bytes >> 20}M or more, a smaller --gpu-reserve, or end other"
            " programs on the GPU; --gpu-cache 0 does without it",
        )
    if chosen > room_bytes:
        raise PlanError(
            f"a GPU cache of {mib(chosen)}, {mib(resident_bytes)} of resident tensors and"
            f" {mib(kept_bytes)} for a client do not fit the {mib(free_bytes)} that are free",
            f"give --gpu-cache {max(0, room_bytes) >> 20}M or less, or a smaller --gpu-reserve",
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
    )
