"""What fits: slots of each size class from a memory budget, before anything is allocated."""

from dataclasses import dataclass
from pathlib import Path

from shared.arena import ArenaLayout, slot_bytes
from shared.errors import PlanError
from shared.experts import ExpertIndex

# The floor lets two clients decode: each one's top-k in use, and as much again in reserve.
FLOOR_CLIENTS = 2
# A section may need this share of a class, at least the top-k. What every client keeps in reserve
# is as much, so a larger share would cost hits, a smaller one prefill waves.
WAVE_DIVISOR = 64
# Left to everything else when the budget is chosen automatically.
AUTO_SHARE = 0.75


@dataclass(frozen=True)
class HostPlan:
    """The host tier: slots by size class, and why not more."""

    layout: ArenaLayout
    wave_experts: tuple[int, ...]
    budget_bytes: int
    floor_bytes: int
    full_bytes: int
    available_bytes: int


def available_memory_bytes() -> int:
    """What can be allocated now: MemAvailable, or what the control group leaves if that is less."""
    with open("/proc/meminfo") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    free_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    room_bytes = cgroup_room_bytes()
    return free_bytes if room_bytes is None else min(free_bytes, room_bytes)


def cgroup_room_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What our control group (v2) may still allocate; None where no limit is set or readable."""
    try:
        membership = Path("/proc/self/cgroup").read_text().strip().splitlines()[-1]
        group = root / membership.split(":", 2)[2].lstrip("/")
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, IndexError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def plan_host(
    experts: ExpertIndex,
    align: int,
    budget_bytes: int | None,
    resident_bytes: int,
    available_bytes: int,
) -> HostPlan:
    """Slots for a budget in bytes (None: choose one).

    Raises PlanError below the floor or beyond the memory there is.
    """
    sizes = [slot_bytes(c.part_bytes, align) for c in experts.classes]
    counts = [c.expert_count for c in experts.classes]
    floors = [min(count, 2 * experts.top_k * FLOOR_CLIENTS) for count in counts]
    floor_bytes = sum(f * size for f, size in zip(floors, sizes, strict=True))
    full_bytes = sum(count * size for count, size in zip(counts, sizes, strict=True))
    room_bytes = available_bytes - resident_bytes
    chosen = budget_bytes
    if chosen is None:
        chosen = min(full_bytes, int(AUTO_SHARE * max(0, room_bytes)))
    if chosen < floor_bytes:
        raise PlanError(
            f"a host cache of {_mib(chosen)} cannot hold the {_mib(floor_bytes)} this model needs"
            f" at least (top-{experts.top_k} experts in use and in reserve, two clients)",
            f"give --host-cache {-(-floor_bytes // 2**20)}M or more",
        )
    if min(chosen, full_bytes) > room_bytes:
        raise PlanError(
            f"a host cache of {_mib(min(chosen, full_bytes))} and {_mib(resident_bytes)} of"
            f" resident tensors do not fit the {_mib(available_bytes)} of memory that is free",
            "give a smaller --host-cache, or end other programs",
        )
    slot_counts = _split(chosen, sizes, counts, floors)
    waves = tuple(
        experts.n_experts if slots == count else max(experts.top_k, slots // WAVE_DIVISOR)
        for slots, count in zip(slot_counts, counts, strict=True)
    )
    parts = tuple(c.part_bytes for c in experts.classes)
    layout = ArenaLayout(parts, tuple(slot_counts), align)
    return HostPlan(layout, waves, chosen, floor_bytes, full_bytes, available_bytes)


def _split(budget_bytes: int, sizes: list[int], counts: list[int], floors: list[int]) -> list[int]:
    """Slots for each class: the same share of its experts, but never less than its floor.

    Every layer chooses its top-k for every token, so demand goes by layers, and the experts of all
    layers are as likely to be wanted; a class raised to its floor takes from the others.
    """
    shares = [0] * len(sizes)
    open_classes = set(range(len(sizes)))
    while open_classes:
        left_bytes = budget_bytes - sum(
            shares[c] * sizes[c] for c in range(len(sizes)) if c not in open_classes
        )
        wanted_bytes = sum(counts[c] * sizes[c] for c in open_classes)
        share = min(1.0, left_bytes / wanted_bytes)
        raised = [c for c in open_classes if int(share * counts[c]) < floors[c]]
        for c in raised:
            shares[c] = floors[c]
        open_classes -= set(raised)
        if not raised:
            for c in open_classes:
                shares[c] = int(share * counts[c])
            break
    assert sum(n * size for n, size in zip(shares, sizes, strict=True)) <= budget_bytes
    return shares


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"
