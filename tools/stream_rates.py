"""What the machine can do: the drive's rate for slabs, and the bus to the GPU."""

import time
from contextlib import ExitStack
from pathlib import Path

import torch

from shared.io_choice import IoChoice, Rate
from streamd.commands.bench_io import Bench
from streamd.readers.probe import choose_engine

DISK_SECONDS = 2.0
DEPTHS = (8, 16, 32)
COPY_BYTES = 5 << 20
COPY_COUNT = 400


def disk_rate_mb_s(model: Path, io: IoChoice) -> float:
    """The best over a few depths, of reads of whole slabs into memory as slots have it."""
    engine, _ = choose_engine(io.engine, 1)
    engine.close()
    with ExitStack() as stack:
        bench = Bench(model, stack, max(DEPTHS))
        pages = next(name for name in bench.memories if name.startswith("shared"))
        seconds = DISK_SECONDS / len(DEPTHS)
        rows = [bench.measure(engine.name, "slabs", pages, depth, seconds) for depth in DEPTHS]
    rate = max(row.mb_s for row in rows)
    if io.paced_bytes_per_s is not None:
        rate = min(rate, io.paced_bytes_per_s / 1e6)
    return rate


def pcie_rate_mb_s(device: torch.device, pace: Rate) -> float | None:
    """Copies of a slab's size from pinned memory, or a pace below; None without a GPU."""
    if device.type != "cuda":
        return None
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8).pin_memory()
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    started_s = time.perf_counter()
    for _ in range(COPY_COUNT):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    rate = COPY_COUNT * COPY_BYTES / (time.perf_counter() - started_s) / 1e6
    return min(rate, pace / 1e6) if pace else rate
