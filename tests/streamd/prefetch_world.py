"""A host tier in simulated time: the real scheduler, cache and reader, a fake disk and clock.

Clients decode tokens: a section a layer, hints if they give any, a fixed time of computing. Routing
is skewed and drifts from token to token, as real routing does.
"""

import errno
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from shared.residency import ClientArea, ResidencyTable, TableShape
from shared.slots import ClassSlots
from streamd.readers.depth import DepthController
from streamd.readers.reader import Reader
from streamd.readers.slab_read import Extent, SlabRead
from streamd.scheduling.scheduler import Scheduler
from streamd.slot_cache.cache import HostCache
from streamd.slot_cache.cache_integrity import check_integrity
from streamd.slot_cache.grants import Grant

PIECE_BYTES = 1 << 16
SLAB_BYTES = 3 * PIECE_BYTES
LIMIT_BYTES = 8 * PIECE_BYTES  # in flight
TOP_K = 2
DISK_BYTES_PER_MS = 1 << 20
LATENCY_MS = 0.1
TURN_MS = 1.0  # the main loop looks at least so often while hints are about


class FakeFile:
    align_bytes, size_bytes, fd, direct, path = 1, 1 << 40, -1, True, "fake"

    def change(self) -> str:
        return ""


class FakeDisk:
    """An engine that serves one read after the other at a fixed rate."""

    name, depth = "fake", 64

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.free_at_ms = 0.0
        self.is_broken = False
        self.queue: deque[tuple[float, int, int]] = deque()  # ends at, token, bytes

    def fileno(self) -> int:
        return -1

    def register(self, buffer: memoryview) -> None:
        pass

    def submit(self, token: int, fd: int, buffer: memoryview, offset: int) -> None:
        begins_ms = max(self.now_ms + LATENCY_MS, self.free_at_ms)
        self.free_at_ms = begins_ms + buffer.nbytes / DISK_BYTES_PER_MS
        self.queue.append((self.free_at_ms, token, buffer.nbytes))

    def flush(self) -> None:
        pass

    def reap(self) -> list[tuple[int, int]]:
        ended = []
        while self.queue and self.queue[0][0] <= self.now_ms:
            _, token, size_bytes = self.queue.popleft()
            ended.append((token, -errno.EIO if self.is_broken else size_bytes))
        return ended

    def close(self) -> None:
        pass


class FakeTier:
    """The scheduler's carrier over the real reader; all slots share one piece of memory."""

    def __init__(self, disk: FakeDisk) -> None:
        self.reader = Reader(
            disk,
            [FakeFile()],
            depth=16,
            piece_bytes=PIECE_BYTES,
            controller=DepthController(LIMIT_BYTES, LIMIT_BYTES, LIMIT_BYTES),
            clock=lambda: disk.now_ms / 1000,
        )
        self._memory = memoryview(bytearray(SLAB_BYTES))
        self.read_count = 0

    @property
    def room(self) -> int:
        return self.reader.room

    def submit(self, grant: Grant) -> None:
        self.read_count += 1
        extent = Extent(0, 0, SLAB_BYTES, self._memory)
        self.reader.submit(SlabRead(grant.slot, (extent,)), grant.priority)

    def promote(self, slot: int, owner: int) -> None:
        self.reader.promote(slot, owner)

    def withdraw(self, slot: int) -> bool:
        return self.reader.withdraw(slot)


Foresight = Callable[[random.Random, tuple[int, ...], int], list[int]]


def perfect(rng: random.Random, coming: tuple[int, ...], n_experts: int) -> list[int]:
    return list(coming)


def hopeless(rng: random.Random, coming: tuple[int, ...], n_experts: int) -> list[int]:
    others = [expert for expert in range(n_experts) if expert not in coming]
    return rng.sample(others, TOP_K)


@dataclass
class Decoder:
    """One client. routing: experts by token and layer; at: where in the token it stands."""

    number: int
    area: ClientArea
    routing: list[list[tuple[int, ...]]]
    foresight: Foresight | None
    compute_ms: float
    token: int = 0
    layer: int = 0
    missing: list[int] = field(default_factory=list)
    busy_until_ms: float = 0.0
    waited_ms: float = 0.0
    asked_at_ms: float = 0.0
    hits: int = 0
    lookups: int = 0

    @property
    def done(self) -> bool:
        return self.token == len(self.routing)


class PrefetchWorld:
    def __init__(self, slot_count: int = 64, n_layers: int = 8, n_experts: int = 32) -> None:
        self.n_layers, self.n_experts = n_layers, n_experts
        shape = TableShape(n_layers, n_experts)
        self.shape = shape
        self.table = ResidencyTable(bytearray(shape.table_bytes), shape)
        self.table.initialise()
        self.disk = FakeDisk()
        self.tier = FakeTier(self.disk)
        slots = ClassSlots(0, slot_count, shape.cell_count, TOP_K)
        self.cache = HostCache(self.table, [0] * n_layers, [slots], lambda: None, self.now_ms)
        sizes = (SLAB_BYTES,) * n_layers
        self.scheduler = Scheduler(self.cache, self.tier, sizes, self.now_ms)
        self.decoders: list[Decoder] = []
        self.rng = random.Random(1)

    def now_ms(self) -> float:
        return self.disk.now_ms

    def routing(self, token_count: int, seed: int) -> list[list[tuple[int, ...]]]:
        """Skewed (few experts are hot in each layer), and half of it as the token before."""
        rng = random.Random(seed)
        weights = [1 / (rank + 1) for rank in range(self.n_experts)]
        ranks = [rng.sample(range(self.n_experts), self.n_experts) for _ in range(self.n_layers)]
        tokens: list[list[tuple[int, ...]]] = []
        for _ in range(token_count):
            layers = []
            for layer in range(self.n_layers):
                chosen: set[int] = set()
                while len(chosen) < TOP_K:
                    chosen.add(rng.choices(ranks[layer], weights)[0])
                layers.append(tuple(sorted(chosen)))
            tokens.append(layers)
        return tokens

    def decoder(
        self,
        token_count: int = 60,
        foresight: Foresight | None = None,
        seed: int = 0,
        compute_ms: float = 0.4,
    ) -> Decoder:
        area = ClientArea(bytearray(self.shape.area_bytes), self.shape)
        area.initialise()
        number = len(self.decoders)
        self.scheduler.attach(number, area)
        decoder = Decoder(number, area, self.routing(token_count, seed), foresight, compute_ms)
        self.decoders.append(decoder)
        return decoder

    def run(self) -> None:
        """Until every client has decoded its tokens."""
        for decoder in self.decoders:
            self._begin(decoder)
        while not all(decoder.done for decoder in self.decoders):
            self._turn(decoding=True)

    def idle(self, duration_ms: float) -> None:
        """No client does anything for so long."""
        end_ms = self.now_ms() + duration_ms
        while self.now_ms() < end_ms:
            self._turn(end_ms)

    def _turn(self, end_ms: float = float("inf"), decoding: bool = False) -> None:
        """What the daemon's main loop does, then what the clients do; then time moves on."""
        for completion in self.tier.reader.poll():
            if completion.error is None:
                self.scheduler.landed(completion.key)
            else:
                assert self.disk.is_broken
                self.scheduler.failed(completion.key)
        self.scheduler.step()
        check_integrity(self.cache)
        for decoder in self.decoders if decoding else ():
            while not decoder.done and self._advance(decoder):
                pass
        self.scheduler.step()  # their messages wake it up
        events = [self.now_ms() + TURN_MS, end_ms]
        events += [self.disk.queue[0][0]] if self.disk.queue else []
        if decoding:
            events += [d.busy_until_ms for d in self.decoders if not d.done and not d.missing]
        self.disk.now_ms = max(self.now_ms() + 1e-6, min(events))

    def _advance(self, decoder: Decoder) -> bool:
        """Whether something could be done."""
        row = self.table.host_slots[decoder.layer]
        if decoder.missing:
            if any(row[expert] < 0 for expert in decoder.missing):
                return False
            decoder.missing.clear()
            decoder.waited_ms += self.now_ms() - decoder.asked_at_ms
            decoder.busy_until_ms = self.now_ms() + decoder.compute_ms
        if self.now_ms() < decoder.busy_until_ms:
            return False
        decoder.layer += 1
        if decoder.layer == self.n_layers:
            decoder.layer, decoder.token = 0, decoder.token + 1
        if decoder.done:
            decoder.area.leave()
            return False
        self._begin(decoder)
        return True

    def _begin(self, decoder: Decoder) -> None:
        """Enter a layer's section: look up, ask for what is missing, hint the next layer."""
        area, layer = decoder.area, decoder.layer
        section = area.enter(self.table)
        experts = decoder.routing[decoder.token][layer]
        area.uses[layer, list(experts)] += np.uint32(1)
        row = self.table.host_slots[layer]
        decoder.missing = [expert for expert in experts if row[expert] < 0]
        decoder.lookups += len(experts)
        decoder.hits += len(experts) - len(decoder.missing)
        decoder.asked_at_ms = self.now_ms()
        decoder.busy_until_ms = self.now_ms() + decoder.compute_ms
        if decoder.missing:
            self.cache.fetch(decoder.number, section, layer, decoder.missing)
        if decoder.foresight is not None and layer + 1 < self.n_layers:
            coming = decoder.routing[decoder.token][layer + 1]
            guess = decoder.foresight(self.rng, coming, self.n_experts)
            self.scheduler.hint(decoder.number, area, section + 1, layer + 1, guess, len(guess))
