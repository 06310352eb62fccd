"""`streamd bench-io`: how fast this drive gives expert slabs, by engine, depth and pages."""

import itertools
import random
import resource
import select
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared import shm
from shared.arena import PART_COUNT, slot_bytes, stretch_bytes
from shared.errors import ConfigError
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from streamd.commands.io_best import IoBest
from streamd.readers.depth import DepthController
from streamd.readers.direct import OpenFile, open_file
from streamd.readers.probe import ENGINES as REAL_ENGINES
from streamd.readers.probe import choose_engine, make_engine
from streamd.readers.reader import PIECE_BYTES, Reader
from streamd.readers.slab_read import Extent, SlabRead
from streamd.tiers.pages import page_report
from streamd.tiers.populate import PageFinder
from streamd.tiers.regions import Region, private_memory

DEPTHS = (1, 4, 8, 16, 32)
PATTERNS = ("slabs", "sequential")
ROW_SECONDS = 0.7
ROW_MAX_BYTES = 4 << 30
# Rates of engines that differ by less are the same, as two runs of one engine often do.
SAME_ENGINE_SHARE = 0.1
# A slower choice within this share wins if it needs less depth: its reads wait less.
SAME_DEPTH_SHARE = 0.03
# Slabs beyond the depth, so that there is always one that waits.
SPARE_SLOTS = 8
WAIT_MS = 5000


Combination = tuple[str, str, str, int]  # engine, pattern, pages, depth


@dataclass(frozen=True)
class Row:
    engine: str
    pattern: str
    depth: int
    pages: str
    mb_s: float
    cpu_ms_per_gb: float
    latency_ms_p50: float
    latency_ms_p99: float


class Bench:
    """One model file, and memory to read it into: shared as slots are, and private.

    memories: by kind, "shared 4 KiB" for example; which pages it has got is read from smaps.
    """

    def __init__(
        self, model: Path, stack: ExitStack, depth_max: int = max(DEPTHS), seed: int = 1
    ) -> None:
        index = GgufIndex.open(model)
        self.experts = ExpertIndex.from_gguf(index)
        self._files: list[OpenFile] = []
        for path in index.paths:
            self._files.append(open_file(path))
            stack.callback(self._files[-1].close)
        self._align = max(file.align_bytes for file in self._files)
        self._random = random.Random(seed)
        self._places = [
            (layer, expert)
            for size_class in self.experts.classes
            for layer in size_class.layers
            for expert in range(self.experts.n_experts)
        ]
        largest = max(slot_bytes(c.part_bytes, self._align) for c in self.experts.classes)
        self._slot_bytes = max(largest, stretch_bytes(PIECE_BYTES, self._align))
        self._slot_count = depth_max + SPARE_SLOTS
        size_bytes = self._slot_bytes * self._slot_count
        private = private_memory(size_bytes)
        shared_region = Region("streamd-bench", size_bytes)
        stack.callback(shared_region.close)
        find_pages = PageFinder()
        stack.callback(find_pages.close)
        self.memories: dict[str, memoryview] = {}
        for name, mapping in ("shared", shared_region.memory), ("private", private):
            memory = memoryview(mapping)
            for slot in self._slots(memory):
                find_pages(slot)
            self.memories[f"{name} {page_report(shm.address(mapping)).kind}"] = memory

    def combinations(self) -> list[Combination]:
        """Every engine that works, pattern, kind of pages and depth."""
        engines = []
        for engine in REAL_ENGINES:
            with suppress(ConfigError):
                choose_engine(engine, 1)[0].close()
                engines.append(engine)
        return list(itertools.product(engines, PATTERNS, self.memories, DEPTHS))

    def measure(
        self, engine_name: str, pattern: str, pages: str, depth: int, seconds: float
    ) -> Row:
        """Keep `depth` reads in flight for so long, with an engine that works here."""
        limit = DepthController.fixed(PIECE_BYTES * depth)
        reader = Reader(make_engine(engine_name, depth), self._files, depth, controller=limit)
        slots = self._slots(self.memories[pages])
        for slot in slots:
            reader.register(slot)
        requests = self._slabs() if pattern == "slabs" else self._sequential()
        try:
            return self._run(reader, slots, requests, (pattern, depth, pages), seconds)
        finally:
            reader.close()

    def _slots(self, memory: memoryview) -> list[memoryview]:
        size = self._slot_bytes
        return [memory[at * size : (at + 1) * size] for at in range(self._slot_count)]

    def _run(
        self,
        reader: Reader,
        slots: list[memoryview],
        requests: Iterator[Callable[[memoryview], tuple[Extent, ...]]],
        labels: tuple[str, int, str],
        seconds: float,
    ) -> Row:
        bell = select.poll()
        bell.register(reader.fileno(), select.POLLIN)
        free = list(range(len(slots)))
        started_s, cpu_before_s = time.perf_counter(), _cpu_s()
        done_bytes = 0
        elapsed_s = 0.0
        while done_bytes == 0 or (elapsed_s < seconds and done_bytes < ROW_MAX_BYTES):
            while free:
                number = free.pop()
                reader.submit(SlabRead(number, next(requests)(slots[number])))
            if not bell.poll(WAIT_MS):
                raise ConfigError("the drive has not answered for 5 s", "see the kernel's log")
            for completion in reader.poll():
                if completion.error is not None:
                    raise completion.error
                assert isinstance(completion.key, int)
                free.append(completion.key)
                done_bytes += completion.bytes_read
            elapsed_s = time.perf_counter() - started_s
        cpu_s = _cpu_s() - cpu_before_s
        stats = reader.stats()
        pattern, depth, pages = labels
        return Row(
            stats.engine,
            pattern,
            depth,
            pages,
            round(done_bytes / elapsed_s / 1e6, 1),
            round(cpu_s * 1000 / (done_bytes / 1e9), 1),
            round(stats.latency_ms_p50, 3),
            round(stats.latency_ms_p99, 3),
        )

    def _slabs(self) -> Iterator[Callable[[memoryview], tuple[Extent, ...]]]:
        """Experts at random, each its gate, up and down."""
        while True:
            layer, expert = self._random.choice(self._places)
            parts = self.experts.extents(layer, expert)

            def place(slot: memoryview, parts: tuple[Any, ...] = parts) -> tuple[Extent, ...]:
                extents, offset = [], 0
                for part in parts[:PART_COUNT]:
                    capacity = stretch_bytes(part.length, self._align)
                    target = slot[offset : offset + capacity]
                    extents.append(Extent(part.file_index, part.offset, part.length, target))
                    offset += capacity
                return tuple(extents)

            yield place

    def _sequential(self) -> Iterator[Callable[[memoryview], tuple[Extent, ...]]]:
        """The largest file from front to back, over and over, in pieces."""
        sizes = [file.size_bytes for file in self._files]
        size_bytes = max(sizes)
        file_index = sizes.index(size_bytes)
        piece_bytes = min(PIECE_BYTES, size_bytes)
        while True:
            for offset in range(0, size_bytes - piece_bytes + 1, piece_bytes):

                def place(slot: memoryview, offset: int = offset) -> tuple[Extent, ...]:
                    return (Extent(file_index, offset, piece_bytes, slot),)

                yield place


def choose_best(rows: list[Row]) -> IoBest:
    """The fastest for slabs into memory that clients share.

    Of engines as fast as each other the one that costs the least CPU time, then the least depth.
    """
    slabs = [row for row in rows if row.pattern == "slabs" and row.pages.startswith("shared")]
    by_engine: dict[str, list[Row]] = {}
    for row in slabs:
        by_engine.setdefault(row.engine, []).append(row)
    peaks = [max(own, key=lambda row: row.mb_s) for own in by_engine.values()]
    least = (1 - SAME_ENGINE_SHARE) * max(row.mb_s for row in peaks)
    peak = min((row for row in peaks if row.mb_s >= least), key=lambda row: row.cpu_ms_per_gb)
    least = (1 - SAME_DEPTH_SHARE) * peak.mb_s
    good = [row for row in by_engine[peak.engine] if row.mb_s >= least]
    best = min(good, key=lambda row: row.depth)
    return IoBest(best.engine, best.depth, best.mb_s)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
