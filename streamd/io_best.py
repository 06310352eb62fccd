"""What `streamd bench-io` found best for a drive, kept for later starts.

One JSON file for all drives: {"<major>:<minor>": {"engine": ..., "depth": ..., "mb_s": ...}}. One
that is missing, damaged or written by another version counts as empty: it is a cache.
"""

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from shared.io_choice import ENGINES

MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class IoBest:
    engine: str
    depth: int
    mb_s: float


def cache_path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "streamd", "io-best.json")


def drive_of(path: Path) -> str:
    """The drive that a file lies on, by the kernel's numbers."""
    device = os.stat(path).st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def load_best(drive: str, depth_max: int) -> IoBest | None:
    found = _load().get(drive)
    match found:
        case {"engine": str(engine), "depth": int(depth), "mb_s": float(mb_s)} if (
            engine in ENGINES and 1 <= depth <= depth_max
        ):
            return IoBest(engine, depth, mb_s)
    return None


def save_best(drive: str, best: IoBest) -> None:
    """Raises OSError where it cannot be kept."""
    values = _load() | {drive: asdict(best)}
    path = cache_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(values, file)
    os.replace(file.name, path)


def _load() -> dict[str, object]:
    try:
        with cache_path().open("rb") as file:
            values = json.loads(file.read(MAX_FILE_BYTES))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
