"""How much memory can still be had, by the machine and by our control group."""

from dataclasses import dataclass
from pathlib import Path


def available_memory_bytes() -> int:
    """What can be allocated now: MemAvailable, or what the control group leaves if that is less."""
    with open("/proc/meminfo") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    free_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    room_bytes = cgroup_room_bytes()
    return free_bytes if room_bytes is None else min(free_bytes, room_bytes)


def cgroup_room_bytes(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """What our control group and those above it may still allocate; versions 1 and 2.

    None where no limit is set or readable. Cached pages of files are room: the kernel drops them.

        0::/user.slice/a.scope     version 2: one tree, at `root`
        9:memory:/docker/abc       version 1: a tree a controller, this one at `root`/memory
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return None
    rooms: list[int | None] = []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if not controllers:
            rooms += [_room_bytes(group, _V2) for group in _groups(root, path)]
        elif "memory" in controllers.split(","):
            rooms += [_room_bytes(group, _V1) for group in _groups(root / "memory", path)]
    return min((room for room in rooms if room is not None), default=None)


# Version 1 has no word for it: it says the most pages that it can count, in bytes.
NO_LIMIT_BYTES = 1 << 62


@dataclass(frozen=True)
class _Files:
    limit: str
    used: str
    stat_prefix: str


_V2 = _Files("memory.max", "memory.current", "")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _groups(root: Path, path: str) -> list[Path]:
    """Ours and those above it, as far up as `root`: in a container that is all there is to see."""
    group = root / path.lstrip("/")
    return [g for g in (group, *group.parents) if g.is_relative_to(root)]


def _room_bytes(group: Path, files: _Files) -> int | None:
    try:
        limit_bytes = int((group / files.limit).read_text())  # ValueError for "max"
        used_bytes = int((group / files.used).read_text())
        kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached_bytes = sum(
            int(kinds[f"{files.stat_prefix}{kind}_file"]) for kind in ("active", "inactive")
        )
    except (OSError, KeyError, ValueError):
        return None
    if limit_bytes >= NO_LIMIT_BYTES:
        return None
    return max(0, limit_bytes - used_bytes + cached_bytes)
