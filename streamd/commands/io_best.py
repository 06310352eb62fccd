"""What `streamd bench-io` found best for a drive and reads of a size, kept for later starts.

One JSON file for all of them: a drive gives small slabs at another rate than large ones, so the
key has both:

    {"<major>:<minor>/<log2>": {"engine": ..., "depth": ..., "mb_s": ...}}

log2: of the least power of two that the longest read does not exceed. A file that is missing,
damaged or written by another version counts as empty: it is a cache.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from shared.experts import ExpertIndex
from shared.io_choice import ENGINES
from shared.user_files import cache_dir, replacing
from streamd.readers.reader import PIECE_BYTES

MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class IoBest:
    engine: str
    depth: int
    mb_s: float


def cache_path() -> Path:
    return cache_dir() / "io-best.json"


def reads_of(path: Path, experts: ExpertIndex) -> str:
    """The key of a model's reads: the drive that its file lies on, by the kernel's numbers, and
    the size class of its largest parts, which the reader cuts into pieces."""
    device = os.stat(path).st_dev
    read_bytes = min(largest_part_bytes(experts), PIECE_BYTES)
    return f"{os.major(device)}:{os.minor(device)}/{(read_bytes - 1).bit_length()}"


def largest_part_bytes(experts: ExpertIndex) -> int:
    return max(max(size_class.part_bytes) for size_class in experts.classes)


def load_best(reads: str, depth_max: int) -> IoBest | None:
    """reads: as `reads_of` names them."""
    found = _load().get(reads)
    match found:
        case {"engine": str(engine), "depth": int(depth), "mb_s": float(mb_s)} if (
            engine in ENGINES and 1 <= depth <= depth_max
        ):
            return IoBest(engine, depth, mb_s)
    return None


def save_best(reads: str, best: IoBest) -> None:
    """Raises OSError where it cannot be kept."""
    values = _load() | {reads: asdict(best)}
    path = cache_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(json.dumps(values).encode())


def _load() -> dict[str, object]:
    try:
        with cache_path().open("rb") as file:
            values = json.loads(file.read(MAX_FILE_BYTES))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
