"""What fits in host memory: slots of each size class, before anything is allocated."""

from dataclasses import dataclass

from shared.arena import ArenaLayout
from shared.errors import PlanError
from shared.experts import ExpertIndex
from shared.sizes import at_least, mb
from shared.slot_plan import Demand, place

# Left to everything else when the budget is chosen automatically.
AUTO_SHARE = 0.75


@dataclass(frozen=True)
class HostPlan:
    """The host tier: slots by size class, and why not more.

    process_bytes: what the daemon's process takes besides slots and resident tensors.
    """

    layout: ArenaLayout
    wave_experts: tuple[int, ...]
    budget_bytes: int
    floor_bytes: int
    full_bytes: int
    process_bytes: int
    available_bytes: int


def plan_host(
    experts: ExpertIndex,
    align: int,
    budget_bytes: int | None,
    resident_bytes: int,
    process_bytes: int,
    available_bytes: int,
    lane_count: int = 0,
) -> HostPlan:
    """Slots for a budget in bytes (None: choose one).

    process_bytes: of the daemon's process, all of them, though some are taken when what is
    available is looked up. lane_count: slabs on their way to a GPU at a time. Raises PlanError
    below the floor or beyond the memory there is.
    """
    demand = Demand.of(experts, align, lane_count)
    floor_bytes, full_bytes = demand.floor_bytes, demand.full_bytes
    room_bytes = available_bytes - resident_bytes - process_bytes
    chosen = budget_bytes
    if chosen is None:
        chosen = min(full_bytes, int(AUTO_SHARE * max(0, room_bytes)))
    if chosen < floor_bytes:
        uploads = f", {lane_count} uploads to the GPU" if lane_count else ""
        raise PlanError(
            f"a host cache of {mb(chosen)} cannot hold the {mb(floor_bytes)} this model needs"
            f" at least (top-{experts.top_k} experts in use and in reserve, two clients{uploads})",
            f"give --host-cache {at_least(floor_bytes)} or more"
            + (", or --gpu-cache 0" if lane_count else ""),
        )
    if min(chosen, full_bytes) > room_bytes:
        raise PlanError(
            f"a host cache of {mb(min(chosen, full_bytes))}, {mb(resident_bytes)} of resident"
            f" tensors and {mb(process_bytes)} for the daemon's process do not fit the"
            f" {mb(available_bytes)} of memory that is free",
            "give a smaller --host-cache, or end other programs",
        )
    layout, waves = place(experts, demand, chosen)
    return HostPlan(layout, waves, chosen, floor_bytes, full_bytes, process_bytes, available_bytes)
