"""The model that is served: its file opened, its memory planned and shared, its cache empty."""

import logging
import mmap
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from shared import shm
from shared.arena import ArenaLayout
from shared.errors import ConfigError
from shared.experts import ExpertIndex, resident_tensors
from shared.gguf_index import GgufIndex
from shared.membarrier import choose_barrier
from shared.residency import ResidencyTable, TableShape
from shared.resident import gpu_resident_layout, resident_layout
from shared.wire import GPU_TIER, HOST_TIER
from streamd.cache import HostCache
from streamd.checksums import SlabChecksums
from streamd.config import DEPTH_MAX, StreamdConfig
from streamd.gpu.cuda_device import CudaDevice
from streamd.gpu.device import GpuDevice
from streamd.gpu_plan import GpuPlan
from streamd.gpu_tier import GpuTier, OpenGpu, open_gpu
from streamd.host_tier import HostTier
from streamd.io_best import drive_of, load_best
from streamd.plan import available_memory_bytes, class_slots, plan_host
from streamd.readers.direct import OpenFile, open_file
from streamd.readers.paced_engine import PacedEngine
from streamd.readers.probe import AUTO, choose_engine
from streamd.readers.reader import Reader
from streamd.regions import Region
from streamd.resident import load_resident
from streamd.uploads import LANE_COUNT

log = logging.getLogger(__name__)

DEFAULT_DEPTH = 32


@dataclass(frozen=True)
class OfferedTier:
    """What a client of one tier gets, as shared.wire.Attached has it, and the cache it uses."""

    cache: HostCache
    layout: ArenaLayout
    wave_experts: tuple[int, ...]
    arena_fd: int
    arena_bytes: int
    resident_fd: int
    resident_bytes: int
    device_ordinal: int = -1
    device_uuid: str = ""


class ServedModel:
    """Everything that exists once a model is served. Resources belong to `stack`.

    gpu: None where there is no GPU tier; tiers: by the names that clients ask for.
    """

    def __init__(
        self,
        config: StreamdConfig,
        stack: ExitStack,
        stopped: Callable[[], bool],
        open_device: OpenGpu = CudaDevice,
    ) -> None:
        self.index = GgufIndex.open(config.model)
        self.experts = ExpertIndex.from_gguf(self.index)
        files = _open_files(self.index, stack)
        tensors = resident_tensors(self.index)
        gpu_residents = gpu_resident_layout(tensors)
        found = find_gpu(config, self.experts, gpu_residents.total_bytes, open_device)
        if found is not None:
            stack.callback(found[0].close)
        align = read_align(files, on_gpu=found is not None)
        residents = resident_layout(tensors, align)
        self.plan = plan_host(
            self.experts,
            align,
            config.host_cache,
            residents.total_bytes,
            available_memory_bytes(),
            LANE_COUNT if found is not None else 0,
        )
        self.reader = _make_reader(files, align, config, stack)
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
            log.info("%s: %.1f MB on pages of %s", what, region.size_bytes / 1e6, region.page_kind)
        barrier = choose_barrier()
        self.cache = HostCache(
            self.table,
            self.experts.layer_class.tolist(),
            class_slots(self.plan.layout, self.plan.wave_experts, self.experts),
            barrier,
            now_ms,
        )
        self.tiers = {HOST_TIER: self._offer_host()}
        self.gpu: GpuTier | None = None
        if found is not None:
            self.gpu = GpuTier(
                *found,
                self.experts,
                self.cache,
                self.plan.layout,
                shm.address(self.tier.region.memory),
                barrier,
                now_ms,
                stack,
            )
            source_address = shm.address(self.resident_region.memory)
            self.gpu.upload_resident(gpu_residents, residents, source_address)
            self.tiers[GPU_TIER] = _offer_gpu(self.gpu)
            log.info("%s: %.1f MB taken", self.gpu.device.name, self.gpu.plan.taken_bytes / 1e6)

    def _offer_host(self) -> OfferedTier:
        return OfferedTier(
            self.cache,
            self.plan.layout,
            self.plan.wave_experts,
            self.tier.region.fd,
            self.tier.region.size_bytes,
            self.resident_region.fd,
            self.resident_region.size_bytes,
        )


def _offer_gpu(gpu: GpuTier) -> OfferedTier:
    return OfferedTier(
        gpu.cache,
        gpu.plan.layout,
        gpu.plan.wave_experts,
        gpu.arena.fd,
        gpu.arena.size_bytes,
        gpu.resident.fd,
        gpu.resident.size_bytes,
        gpu.device.ordinal,
        gpu.device.uuid,
    )


def find_gpu(
    config: StreamdConfig, experts: ExpertIndex, resident_bytes: int, open_device: OpenGpu
) -> tuple[GpuDevice, GpuPlan] | None:
    return open_gpu(
        experts,
        resident_bytes,
        config.wants_gpu,
        config.gpu_ordinal,
        config.gpu_cache,
        config.gpu_reserve,
        open_device,
    )


def read_align(files: list[OpenFile], on_gpu: bool) -> int:
    """Bytes; host slots that are pinned one by one for uploads must not share a page."""
    align = max(file.align_bytes for file in files)
    return max(align, mmap.PAGESIZE) if on_gpu else align


def now_ms() -> float:
    return time.monotonic() * 1000


def plan_model(config: StreamdConfig) -> dict[str, object]:
    """What `streamd plan` says: the tiers' placement, nothing allocated."""
    index = GgufIndex.open(config.model)
    experts = ExpertIndex.from_gguf(index)
    tensors = resident_tensors(index)
    resident_bytes = gpu_resident_layout(tensors).total_bytes
    found = find_gpu(config, experts, resident_bytes, CudaDevice)
    with ExitStack() as stack:
        align = read_align(_open_files(index, stack), on_gpu=found is not None)
    residents = resident_layout(tensors, align)
    available_bytes = available_memory_bytes()
    lane_count = LANE_COUNT if found is not None else 0
    plan = plan_host(
        experts, align, config.host_cache, residents.total_bytes, available_bytes, lane_count
    )
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
        "gpu": None if found is None else _gpu_values(*found),
    }


def _gpu_values(device: GpuDevice, plan: GpuPlan) -> dict[str, object]:
    device.close()
    return {
        "device": device.name,
        "ordinal": device.ordinal,
        "floor_bytes": plan.floor_bytes,
        "full_bytes": plan.full_bytes,
        "budget_bytes": plan.budget_bytes,
        "resident_bytes": plan.resident_bytes,
        "reserve_bytes": plan.reserve_bytes,
        "free_bytes": plan.free_bytes,
        "taken_bytes": plan.taken_bytes,
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


def _make_reader(
    files: list[OpenFile], align: int, config: StreamdConfig, stack: ExitStack
) -> Reader:
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
    reader = Reader(engine, files, depth, align_bytes=align)
    stack.callback(reader.close)
    return reader
