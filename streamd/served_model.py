"""The model that is served: its file opened, its memory planned and shared, its cache empty."""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack

from shared.errors import ConfigError
from shared.experts import ExpertIndex, resident_tensors
from shared.gguf_index import GgufIndex
from shared.membarrier import choose_barrier
from shared.residency import ResidencyTable, TableShape
from shared.resident import resident_layout
from streamd.cache import HostCache
from streamd.checksums import SlabChecksums
from streamd.config import DEPTH_MAX, StreamdConfig
from streamd.host_tier import HostTier
from streamd.io_best import drive_of, load_best
from streamd.plan import HostPlan, available_memory_bytes, plan_host
from streamd.readers.direct import OpenFile, open_file
from streamd.readers.paced_engine import PacedEngine
from streamd.readers.probe import AUTO, choose_engine
from streamd.readers.reader import Reader
from streamd.regions import Region
from streamd.resident import load_resident
from streamd.slots import ClassSlots

log = logging.getLogger(__name__)

DEFAULT_DEPTH = 32


class ServedModel:
    """Everything that exists once a model is served. Resources belong to `stack`."""

    def __init__(
        self, config: StreamdConfig, stack: ExitStack, stopped: Callable[[], bool]
    ) -> None:
        self.index = GgufIndex.open(config.model)
        self.experts = ExpertIndex.from_gguf(self.index)
        files = _open_files(self.index, stack)
        align = max(file.align_bytes for file in files)
        residents = resident_layout(resident_tensors(self.index), align)
        self.plan = plan_host(
            self.experts,
            align,
            config.host_cache,
            residents.total_bytes,
            available_memory_bytes(),
        )
        self.reader = _make_reader(files, config, stack)
        shape = TableShape(self.experts.n_layers, self.experts.n_experts)
        self.table_region = Region("streamd-table", shape.table_bytes)
        stack.callback(self.table_region.close)
        self.table = ResidencyTable(self.table_region.memory, shape)
        self.table.initialise()
        checksums = SlabChecksums(shape.n_layers, shape.n_experts) if config.verify else None
        self.tier = HostTier(self.plan.layout, self.experts, self.reader, checksums)
        stack.callback(self.tier.close)
        self.resident_region = load_resident(residents, self.reader, stopped)
        stack.callback(self.resident_region.close)
        for what, region in (("slots", self.tier.region), ("tensors", self.resident_region)):
            log.info(
                "%s: %.1f MB on pages of %s", what, region.size_bytes / 1e6, region.pages().kind
            )
        self.cache = HostCache(
            self.table,
            self.experts.layer_class.tolist(),
            class_slots(self.plan, self.experts),
            choose_barrier(),
            now_ms,
        )


def now_ms() -> float:
    return time.monotonic() * 1000


def class_slots(plan: HostPlan, experts: ExpertIndex) -> list[ClassSlots]:
    """The plan's slots, all FREE."""
    counts = plan.layout.class_slot_counts
    return [
        ClassSlots(plan.layout.first_slot(c.class_id), count, c.expert_count, wave)
        for c, count, wave in zip(experts.classes, counts, plan.wave_experts, strict=True)
    ]


def plan_model(config: StreamdConfig) -> dict[str, object]:
    """What `streamd plan` says: the host tier's placement, nothing allocated."""
    index = GgufIndex.open(config.model)
    experts = ExpertIndex.from_gguf(index)
    with ExitStack() as stack:
        align = max(file.align_bytes for file in _open_files(index, stack))
    residents = resident_layout(resident_tensors(index), align)
    available_bytes = available_memory_bytes()
    plan = plan_host(experts, align, config.host_cache, residents.total_bytes, available_bytes)
    return {
        "model": str(config.model),
        "floor_bytes": plan.floor_bytes,
        "full_bytes": plan.full_bytes,
        "budget_bytes": plan.budget_bytes,
        "host_bytes": plan.layout.total_bytes,
        "resident_bytes": residents.total_bytes,
        "available_bytes": available_bytes,
        "experts": sum(c.expert_count for c in experts.classes),
        "slots": plan.layout.slot_count,
        "class_slots": list(plan.layout.class_slot_counts),
        "wave_experts": list(plan.wave_experts),
    }


def _open_files(index: GgufIndex, stack: ExitStack) -> list[OpenFile]:
    files = []
    for path, fingerprint in zip(index.paths, index.fingerprints, strict=True):
        file = open_file(path)
        stack.callback(file.close)
        fingerprint.check_fd(file.fd, path)
        if not file.direct:
            log.warning("%s is read through the page cache: %s", path, file.reason)
        files.append(file)
    return files


def _make_reader(files: list[OpenFile], config: StreamdConfig, stack: ExitStack) -> Reader:
    best = load_best(drive_of(files[0].path), DEPTH_MAX)
    name, depth = config.io.engine, config.io_depth
    if best is not None:
        name = best.engine if name == AUTO else name
        depth = depth or best.depth
        log.info("bench-io found %s at depth %d best for this drive", best.engine, best.depth)
    depth = depth or DEFAULT_DEPTH
    try:
        engine, report = choose_engine(name, depth)
    except ConfigError:
        if config.io.engine != AUTO:
            raise
        engine, report = choose_engine(AUTO, depth)  # what was best once does not work any more
    for line in report:
        log.info("%s", line)
    if config.io.paced_bytes_per_s is not None:
        engine = PacedEngine(engine, config.io.paced_bytes_per_s)
        log.warning("I/O is %s: for benchmarks", engine.name)
    reader = Reader(engine, files, depth)
    stack.callback(reader.close)
    return reader
