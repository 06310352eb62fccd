"""Both tiers on a bench: plain memory, a fake GPU, reads and copies that end on demand.

`turn` is what the daemon's main loop does. After each event both caches are checked, and every slab
that a table names is compared with the file.
"""

import ctypes
from contextlib import ExitStack

import numpy as np
from fake_gpu import FakeDevice

from shared.errors import ReadFailed
from shared.experts import ExpertIndex, SizeClass
from shared.gpu_plan import GpuPlan
from shared.residency import ClientArea, ResidencyTable, TableShape
from shared.slot_plan import Demand, class_slots, place
from streamd.scheduling.scheduler import Scheduler, layer_slab_bytes
from streamd.slot_cache.cache import HostCache
from streamd.slot_cache.cache_integrity import check_integrity
from streamd.slot_cache.grants import Grant
from streamd.tiers.gpu_tier import GpuTier

PAGE_BYTES = 4096
GPU_ALIGN_BYTES = 256
PART_BYTES = (96, 160, 64)
N_LAYERS, N_EXPERTS, TOP_K = 2, 64, 2


def some_experts() -> ExpertIndex:
    """Two layers of experts that lie one after the other from offset 32 of file 0."""
    offsets = np.zeros((N_LAYERS, N_EXPERTS, 3), np.int64)
    sizes = np.tile(PART_BYTES, N_LAYERS * N_EXPERTS)
    offsets.reshape(-1)[:] = 32 + np.cumsum(sizes) - sizes
    size_class = SizeClass(0, PART_BYTES, tuple(range(N_LAYERS)), N_LAYERS * N_EXPERTS)
    files = types = np.zeros((N_LAYERS, 3), np.int32)
    classes = np.zeros(N_LAYERS, np.int32)
    return ExpertIndex(N_LAYERS, N_EXPERTS, TOP_K, (size_class,), classes, offsets, files, types)


def gpu_plan(experts: ExpertIndex, slot_count: int) -> GpuPlan:
    demand = Demand.of(experts, GPU_ALIGN_BYTES)
    layout, waves = place(experts, demand, slot_count * demand.slot_sizes[0])
    return GpuPlan(layout, waves, 0, 0, 0, GPU_ALIGN_BYTES, 0, 0, 0)


class GpuClient:
    def __init__(self, bench: "GpuBench", number: int) -> None:
        self.number = number
        self.area = ClientArea(bytearray(bench.shape.area_bytes), bench.shape)
        self.area.initialise()
        self._bench = bench

    def ask(self, layer: int, *experts: int) -> int:
        """Begin a section that misses these experts; its number."""
        section = self.area.enter(self._bench.table)
        self.area.uses[layer, list(experts)] += np.uint32(1)
        self._bench.gpu.scheduler.fetch(self.number, section, layer, experts)
        return section


class GpuBench:
    def __init__(self, host_slots: int, gpu_slots: int, stack: ExitStack) -> None:
        self.experts = some_experts()
        self.file = np.random.default_rng(0).bytes(64 << 10)
        self.shape = TableShape(N_LAYERS, N_EXPERTS)
        self.table = ResidencyTable(bytearray(self.shape.table_bytes), self.shape)
        self.table.initialise()
        self.now_ms = 0.0
        demand = Demand.of(self.experts, PAGE_BYTES)
        layout, waves = place(self.experts, demand, host_slots * demand.slot_sizes[0])
        self.host_layout = layout
        self._arena = np.zeros(layout.total_bytes + PAGE_BYTES, np.uint8)
        self._arena = self._arena[-self._arena.ctypes.data % PAGE_BYTES :]
        self.host = HostCache(
            self.table,
            [0] * N_LAYERS,
            class_slots(layout, waves, self.experts),
            lambda: None,
            self._now_ms,
        )
        self.reads: dict[int, Grant] = {}  # of the host tier, by slot
        self.promoted: list[int] = []
        self.scheduler = Scheduler(self.host, self, layer_slab_bytes(self.experts), self._now_ms)
        self.device = FakeDevice()
        self.gpu = GpuTier(
            self.device,
            gpu_plan(self.experts, gpu_slots),
            self.experts,
            self.scheduler,
            layout,
            self._arena.ctypes.data,
            lambda: None,
            self._now_ms,
            stack,
        )
        self.told: list[tuple[int, int, int, int]] = []  # client, section, layer, expert: failed
        self.rung: set[int] = set()

    def _now_ms(self) -> float:
        return self.now_ms

    def attach(self, number: int) -> GpuClient:
        client = GpuClient(self, number)
        self.gpu.scheduler.attach(number, client.area)
        return client

    def turn(self) -> None:
        self.rung |= self.gpu.scheduler.step()
        self.gpu.uploads.enter_lanes()
        if self.host.waiting:
            self.scheduler.step()
        self._take_uploads()
        self.scheduler.step()
        self.check()

    # The disk, as a carrier of streamd.scheduling.scheduler

    room = 1000

    def submit(self, grant: Grant) -> None:
        assert grant.slot not in self.reads
        self.reads[grant.slot] = grant
        self._host_slab(grant.slot)[:] = 0xEE  # a read overwrites from now on

    def promote(self, slot: int, owner: int) -> None:
        self.promoted.append(slot)

    def withdraw(self, slot: int) -> bool:
        return False

    def finish_read(self, slot: int) -> None:
        grant = self.reads.pop(slot)
        stretches = self.host_layout.stretches()[slot]
        for (start, _), part in zip(
            stretches, self.experts.extents(grant.layer, grant.expert), strict=True
        ):
            at = int(start) + part.offset % PAGE_BYTES
            self._arena[at : at + part.length] = list(
                self.file[part.offset : part.offset + part.length]
            )
        self.scheduler.landed(slot)
        self._take_uploads()
        self.check()

    def fail_read(self, slot: int) -> None:
        del self.reads[slot]
        _, _, asked = self.scheduler.failed(slot)
        for number, section in asked:
            self.gpu.uploads.fetch_failed(number, section, ReadFailed("the disk is broken"))
        self._take_uploads()
        self.check()

    def _take_uploads(self) -> None:
        for uploaded in self.gpu.uploads.poll():
            if uploaded.error is None:
                self.rung |= set(self.gpu.scheduler.landed(uploaded.slot))
            else:
                layer, expert, asked = self.gpu.scheduler.failed(uploaded.slot)
                self.told += [(number, section, layer, expert) for number, section in asked]
        self.gpu.uploads.go_on()

    def bring(self, client: GpuClient, layer: int, *experts: int) -> None:
        """A whole section: missed, read, uploaded."""
        client.ask(layer, *experts)
        for _ in range(4):
            self.turn()
            for slot in list(self.reads):
                self.finish_read(slot)
            self.device.finish(len(self.device.queued))
        self.turn()
        assert all(self.table.gpu_slots[layer, list(experts)] >= 0)
        client.area.leave()

    # Checks

    def check(self) -> None:
        check_integrity(self.host)
        check_integrity(self.gpu.cache)
        for layer, expert in np.argwhere(self.table.gpu_slots >= 0).tolist():
            self.check_slab(layer, expert)

    def check_slab(self, layer: int, expert: int) -> None:
        slot = self.table.gpu_slots[layer, expert]
        stretches = self.gpu.plan.layout.stretches()[slot]
        for (start, _), part in zip(stretches, self.experts.extents(layer, expert), strict=True):
            held = ctypes.string_at(self.gpu.arena.address + int(start), part.length)
            assert held == self.file[part.offset : part.offset + part.length]

    def _host_slab(self, slot: int) -> np.ndarray:
        stretches = self.host_layout.stretches()[slot]
        return self._arena[stretches[0, 0] : stretches[-1].sum()]
