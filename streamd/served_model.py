"""The model that is served: its file opened, its memory planned and shared, its cache empty."""

import logging
import mmap
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from shared import shm
from shared.arena import ArenaLayout
from shared.daemon_memory import process_bytes
from shared.errors import GpuNotShared
from shared.experts import ExpertIndex
from shared.free_memory import available_memory_bytes
from shared.gguf_index import GgufIndex
from shared.gpu_plan import GpuPlan, client_reserve, gpu_residents
from shared.membarrier import choose_barrier
from shared.mtp import open_served
from shared.residency import ResidencyTable, TableShape
from shared.resident import ResidentLayout, gpu_resident_layout
from shared.sizes import size_text
from shared.slot_plan import class_slots
from shared.streamed import chosen_layers, kept_tensors
from shared.wire import GPU_TIER, HOST_TIER, Attached
from streamd.config import StreamdConfig
from streamd.gpu.cuda_device import CudaDevice
from streamd.gpu.device import GpuDevice
from streamd.gpu.sharing import WITHOUT_SHARING
from streamd.planning.plan import plan_host
from streamd.readers.direct import OpenFile, open_file
from streamd.scheduling.scheduler import Scheduler, layer_slab_bytes
from streamd.served_reader import make_reader
from streamd.sessions import Session
from streamd.slot_cache.cache import HostCache
from streamd.tiers.checksums import SlabChecksums
from streamd.tiers.gpu_tier import GpuTier, OpenGpu, open_gpu
from streamd.tiers.host_tier import HostTier
from streamd.tiers.regions import Region
from streamd.tiers.resident import host_residents, load_resident
from streamd.tiers.resident_uploads import upload_from_disk
from streamd.tiers.uploads import LANE_COUNT

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OfferedTier:
    """What a client of one tier gets, as shared.wire.Attached has it, and the cache it uses.

    cache: the scheduler's.
    """

    scheduler: Scheduler
    layout: ArenaLayout
    wave_experts: tuple[int, ...]
    arena_fd: int
    arena_bytes: int
    resident_fd: int
    resident_bytes: int
    device_ordinal: int = -1
    device_uuid: str = ""
    client_bytes: int = 0
    client_limited: bool = False
    streamed_layers: tuple[int, ...] = ()
    host_resident_fd: int = -1
    host_resident_bytes: int = 0
    host_align: int = 0

    @property
    def descriptors(self) -> list[int]:
        own = [self.arena_fd, self.resident_fd]
        return [*own, self.host_resident_fd] if self.streamed_layers else own

    @property
    def cache(self) -> HostCache:
        return self.scheduler.cache

    def attached(self, session: Session, experts: ExpertIndex) -> Attached:
        """The answer to a client that has just got its session."""
        return Attached(
            client=session.number,
            ticket=session.ticket,
            n_layers=experts.n_layers,
            n_experts=experts.n_experts,
            align=self.layout.align,
            class_slot_counts=list(self.layout.class_slot_counts),
            wave_experts=list(self.wave_experts),
            arena_bytes=self.arena_bytes,
            resident_bytes=self.resident_bytes,
            device_ordinal=self.device_ordinal,
            device_uuid=self.device_uuid,
            client_bytes=self.client_bytes,
            client_limited=self.client_limited,
            streamed_layers=list(self.streamed_layers),
            host_resident_bytes=self.host_resident_bytes,
            host_align=self.host_align,
        )


class ServedModel:
    """Everything that exists once a model is served. Resources belong to `stack`.

    gpu: None where there is no GPU tier; gpu_refusal: why, if it is wanted and cannot be shared;
    tiers: by the names that clients ask for. keeps_residents: whether all resident tensors are in
    host memory; resident_bytes: of those that are.
    """

    def __init__(
        self,
        config: StreamdConfig,
        stack: ExitStack,
        stopped: Callable[[], bool],
        open_device: OpenGpu = CudaDevice,
    ) -> None:
        self.index = open_served(config.model, config.mtp)
        self.experts = ExpertIndex.from_gguf(self.index)
        files = open_files(self.index, stack)
        self.gpu_refusal: GpuNotShared | None = None
        found = self._find_gpu(config, open_device)
        if found is not None:
            stack.callback(found[0].close)
        align = read_align(files, on_gpu=found is not None or self.gpu_refusal is not None)
        gpu_plan = found[1] if found is not None else None
        residents = host_residents(self.index, align, gpu_plan, config.cpu_clients)
        self.keeps_residents = gpu_plan is None or config.cpu_clients
        self.plan = plan_host(
            self.experts,
            align,
            config.host_cache,
            residents.held_bytes,
            process_bytes(found is not None, self.experts.expert_count),
            available_memory_bytes(),
            LANE_COUNT if found is not None else 0,
        )
        self.reader = make_reader(files, self.experts, align, config, stack)
        shape = TableShape(self.experts.n_layers, self.experts.n_experts)
        self.table_region = Region("streamd-table", shape.table_bytes)
        stack.callback(self.table_region.close)
        self.table = ResidencyTable(self.table_region.memory, shape)
        self.table.initialise()
        checksums = SlabChecksums(shape.n_layers, shape.n_experts) if config.verify else None
        self.tier = HostTier(
            self.plan.layout, self.experts, self.reader, checksums, returnable=config.governor
        )
        stack.callback(self.tier.close)
        self.resident_region = load_resident(residents, self.reader, stopped)
        self.resident_bytes = residents.held_bytes
        stack.callback(self.resident_region.close)
        self._log_pages()
        barrier = choose_barrier()
        self.cache = HostCache(
            self.table,
            self.experts.layer_class.tolist(),
            class_slots(self.plan.layout, self.plan.wave_experts, self.experts),
            barrier,
            now_ms,
        )
        slab_bytes = layer_slab_bytes(self.experts)
        self.scheduler = Scheduler(self.cache, self.tier, slab_bytes, now_ms, warm=config.warm)
        self.tiers = {HOST_TIER: self._offer_host()}
        self.gpu: GpuTier | None = None
        if found is not None:
            self.gpu = GpuTier(
                *found,
                self.experts,
                self.scheduler,
                self.plan.layout,
                shm.address(self.tier.region.memory),
                barrier,
                now_ms,
                stack,
                config.warm,
                config.upload_pace,
            )
            self.tiers[GPU_TIER] = self._fill_gpu(self.gpu, residents, config, stopped)

    def _find_gpu(
        self, config: StreamdConfig, open_device: OpenGpu
    ) -> tuple[GpuDevice, GpuPlan] | None:
        try:
            return find_gpu(config, self.index, self.experts, open_device)
        except GpuNotShared as error:
            log.warning("no GPU tier: %s; %s", error.message, WITHOUT_SHARING)
            self.gpu_refusal = error
            return None

    def _upload_resident(
        self, gpu: GpuTier, source: ResidentLayout, stopped: Callable[[], bool]
    ) -> None:
        """What is not streamed: from the host's copy, or straight from the disk without one."""
        choice = gpu.plan.streamed
        if choice.layers:
            log.info(
                "GPU memory does not hold the resident tensors of %d layers: %s to be copied"
                " for every token",
                len(choice.layers),
                size_text(choice.streamed_bytes),
            )
        kept = kept_tensors(self.index, chosen_layers(self.index, choice.layers))
        target = gpu_resident_layout(kept)
        if self.keeps_residents:
            gpu.upload_resident(target, source, shm.address(self.resident_region.memory))
        else:
            upload_from_disk(target, gpu.resident.address, gpu.device, self.reader, stopped)
        log.info("%s: %s taken", gpu.device.name, size_text(gpu.plan.taken_bytes))

    def tell_drive_time(self) -> None:
        """To clients: how idle the drive is."""
        self.table.drive_us = int(1e6 * self.reader.idle_s), int(1e3 * now_ms())

    def _log_pages(self) -> None:
        for what, region in (("slots", self.tier.region), ("tensors", self.resident_region)):
            log.info("%s: %s on pages of %s", what, size_text(region.size_bytes), region.page_kind)

    def _offer_host(self) -> OfferedTier:
        return OfferedTier(
            self.scheduler,
            self.plan.layout,
            self.plan.wave_experts,
            self.tier.region.fd,
            self.tier.region.size_bytes,
            self.resident_region.fd,
            self.resident_region.size_bytes if self.keeps_residents else 0,
        )

    def _fill_gpu(
        self,
        gpu: GpuTier,
        residents: ResidentLayout,
        config: StreamdConfig,
        stopped: Callable[[], bool],
    ) -> OfferedTier:
        self._upload_resident(gpu, residents, stopped)
        layers = gpu.plan.streamed.layers
        return OfferedTier(
            gpu.scheduler,
            gpu.plan.layout,
            gpu.plan.wave_experts,
            gpu.arena.fd,
            gpu.arena.size_bytes,
            gpu.resident.fd,
            gpu.resident.size_bytes,
            gpu.device.ordinal,
            gpu.device.uuid,
            gpu.plan.reserve_bytes,
            config.vram is not None,
            layers,
            self.resident_region.fd,
            self.resident_region.size_bytes if layers else 0,
            self.plan.layout.align if layers else 0,
        )


def find_gpu(
    config: StreamdConfig,
    index: GgufIndex,
    experts: ExpertIndex,
    open_device: OpenGpu,
) -> tuple[GpuDevice, GpuPlan] | None:
    return open_gpu(
        experts,
        gpu_residents(config, index),
        config.wants_gpu,
        config.gpu_ordinal,
        config.gpu_cache,
        client_reserve(config, index),
        open_device,
        config.vram,
    )


def read_align(files: list[OpenFile], on_gpu: bool) -> int:
    """Bytes; host slots that are pinned one by one for uploads must not share a page."""
    align = max(file.align_bytes for file in files)
    return max(align, mmap.PAGESIZE) if on_gpu else align


def now_ms() -> float:
    return time.monotonic() * 1000


def open_files(index: GgufIndex, stack: ExitStack) -> list[OpenFile]:
    files = []
    for path, fingerprint in zip(index.paths, index.fingerprints, strict=True):
        file = open_file(path)
        stack.callback(file.close)
        fingerprint.check_fd(file.fd, path)
        if not file.direct:
            log.warning("%s is read through the page cache: %s", path, file.reason)
        files.append(file)
    return files
