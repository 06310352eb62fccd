"""The two shared regions that hits are served from: the daemon's table and each client's own area.

    table region (the daemon writes, clients map it read-only)
        0     magic u64 | n_layers u64 | n_experts u64 | max_clients u64
        32    tracing u64                    not 0: clients record what their routers choose
        40    idle us u64 | now us u64       how long the drive has had nothing to read for clients,
                                             and when that was written
        64    epoch u64                      alone in its cache line: clients read it every section
        128   revoked u32 [max_clients]
        4096  host_slots i32 [n_layers, n_experts]      the slot that holds the slab, or -1
        ...   gpu_slots  i32 [n_layers, n_experts]

    client area (that client writes, the daemon reads; nobody else has it)
        0     published u64 | section u64    the oldest epoch it may be reading (NONE: none)
        64    hits u64 | misses u64 | fetches u64       lookups, and messages sent
        128   tokens u64
        192   cells u64 | records u64        written to the ring so far
        256   own hits u64 | own misses u64  lookups in slots that the client keeps for itself
        320   scan u64                       1 + the layer that a prompt has reached, or 0
        4096  uses u32 [n_layers, n_experts]            how often the router chose each expert
        ...   scanned u32 [n_layers, n_experts]         the same by long prompts, in USE_PARTS of a
                                                        use (shared/scan.py)
        ...   ring u16 [RING_CELLS]          the cell numbered n is at n % RING_CELLS

    a record in the ring, written only while the daemon traces
        layer | use count (at most 65535) | count | experts [count]

Aligned 4- and 8-byte loads and stores through numpy are single instructions; which order they may
be seen in is docs/protocol.md's matter.
"""

from dataclasses import dataclass
from mmap import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import ProtocolMismatch
from shared.scan import USE_PARTS
from shared.shm import address
from shared.wire import GPU_TIER

MAGIC = 0x5354524D_44303031  # "STRMD001"
NONE_EPOCH = 2**64 - 1
NOT_RESIDENT = -1
MAX_CLIENTS = 64
RING_CELLS = 1 << 17
MAX_CELL = 0xFFFF
_RECORD_HEAD_CELLS = 3
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class TableShape:
    n_layers: int
    n_experts: int

    @property
    def cell_count(self) -> int:
        return self.n_layers * self.n_experts

    @property
    def table_bytes(self) -> int:
        return _PAGE_BYTES + 2 * 4 * self.cell_count

    @property
    def ring_offset(self) -> int:
        return _PAGE_BYTES + 2 * 4 * self.cell_count

    @property
    def area_bytes(self) -> int:
        return self.ring_offset + 2 * RING_CELLS


class ResidencyTable:
    """A view of the table region; the same class on both sides."""

    def __init__(self, region: mmap | bytearray, shape: TableShape) -> None:
        self.shape = shape
        self._header = np.frombuffer(region, np.uint64, 4)
        self._tracing = np.frombuffer(region, np.uint64, 1, offset=32)
        self._drive_us = np.frombuffer(region, np.uint64, 2, offset=40)
        self._epoch = memoryview(region)[64:72].cast("Q")
        self.revoked = np.frombuffer(region, np.uint32, MAX_CLIENTS, offset=128)
        self.host_slots = self._plane(region, 0)
        self.gpu_slots = self._plane(region, 1)

    def _plane(self, region: mmap | bytearray, plane: int) -> npt.NDArray[np.int32]:
        offset = _PAGE_BYTES + plane * 4 * self.shape.cell_count
        cells = np.frombuffer(region, np.int32, self.shape.cell_count, offset=offset)
        return cells.reshape(self.shape.n_layers, self.shape.n_experts)

    def plane_of(self, tier: str) -> npt.NDArray[np.int32]:
        """Slot numbers of the experts, int32 [n_layers, n_experts]; HOST_TIER or GPU_TIER."""
        return self.gpu_slots if tier == GPU_TIER else self.host_slots

    def cells_of(self, tier: str) -> memoryview:
        """The same numbers by key, `layer * n_experts + expert`: quicker, one at a time."""
        return self.plane_of(tier).reshape(-1).data

    def initialise(self) -> None:
        """The daemon, once, before anybody else has the region."""
        self._header[:] = (MAGIC, self.shape.n_layers, self.shape.n_experts, MAX_CLIENTS)
        self._tracing[0] = 0
        self._drive_us[:] = 0
        self._epoch[0] = 1
        self.revoked[:] = 0
        self.host_slots[:] = NOT_RESIDENT
        self.gpu_slots[:] = NOT_RESIDENT

    def check_header(self) -> None:
        """ProtocolMismatch unless the region is laid out as this version expects."""
        expected = (MAGIC, self.shape.n_layers, self.shape.n_experts, MAX_CLIENTS)
        if tuple(self._header.tolist()) != expected:
            raise ProtocolMismatch(
                "the daemon's residency table has another layout",
                "daemon and client are of different versions: restart the daemon",
            )

    @property
    def tracing(self) -> bool:
        """Whether clients shall record what their routers choose."""
        return bool(self._tracing[0])

    @tracing.setter
    def tracing(self, value: bool) -> None:
        self._tracing[0] = value

    @property
    def drive_us(self) -> tuple[int, int]:
        """Idle time of the drive, and the time that it is of; both grow, and only differences of
        them mean anything. They may be of two moments that lie next to each other."""
        idle_us, now_us = self._drive_us.tolist()
        return idle_us, now_us

    @drive_us.setter
    def drive_us(self, value: tuple[int, int]) -> None:
        self._drive_us[:] = value

    @property
    def epoch_address(self) -> int:
        """For compiled code; likewise in ClientArea."""
        return address(self._epoch)

    @property
    def epoch(self) -> int:
        return self._epoch[0]

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch[0] = value


class ClientArea:
    """A view of one client's area; the same class on both sides."""

    def __init__(self, region: mmap | bytearray, shape: TableShape) -> None:
        # One number at a time a memoryview is several times faster than an array.
        self._words = memoryview(region)[:16].cast("Q")
        self._counters = memoryview(region)[64:88].cast("Q")
        self._tokens = np.frombuffer(region, np.uint64, 1, offset=128)
        self._recorded = np.frombuffer(region, np.uint64, 2, offset=192)
        self._own = np.frombuffer(region, np.uint64, 2, offset=256)
        self._scan = np.frombuffer(region, np.uint64, 1, offset=320)
        self._n_layers = shape.n_layers
        self._ring = np.frombuffer(region, np.uint16, RING_CELLS, offset=shape.ring_offset)
        # A record's cells are written before it counts: those of the next one, at the longest, may
        # be half written where the oldest ones were.
        self._sound_cells = RING_CELLS - (_RECORD_HEAD_CELLS + shape.n_experts)
        counted = np.frombuffer(region, np.uint32, 2 * shape.cell_count, offset=_PAGE_BYTES)
        self.counted = counted.reshape(2, shape.n_layers, shape.n_experts)
        self.uses, self.scanned = self.counted

    def initialise(self) -> None:
        self._words[0] = NONE_EPOCH

    @property
    def words_address(self) -> int:
        return address(self._words)

    @property
    def counters_address(self) -> int:
        return address(self._counters)

    @property
    def published(self) -> int:
        return self._words[0]

    @property
    def section(self) -> int:
        return self._words[1]

    @property
    def scan_layer(self) -> int | None:
        """The layer that a prompt of the client's has reached; None while none goes on."""
        layer = int(self._scan[0]) - 1
        return layer if 0 <= layer < self._n_layers else None

    @scan_layer.setter
    def scan_layer(self, layer: int | None) -> None:
        self._scan[0] = 0 if layer is None else layer + 1

    def enter(self, table: ResidencyTable) -> int:
        """Begin a section (and so end the one before it); its number."""
        section = self.section + 1
        self._words[1] = section
        epoch = table.epoch
        while True:
            self._words[0] = epoch
            again = table.epoch
            if again == epoch:
                return section
            epoch = again

    def leave(self) -> None:
        self._words[0] = NONE_EPOCH

    def count_uses(
        self, layer: int, experts: npt.NDArray[np.integer[Any]], use_counts: Any, parts: int
    ) -> None:
        """The router chose `experts` (distinct) so often; each time counts so many USE_PARTS."""
        if parts == USE_PARTS:
            self.uses[layer, experts] += np.uint32(use_counts)
        else:
            self.scanned[layer, experts] += np.uint32(use_counts) * np.uint32(parts)

    def count_lookups(self, hit_count: int, miss_count: int) -> None:
        self._counters[0] += hit_count
        self._counters[1] += miss_count

    def count_fetch(self) -> None:
        self._counters[2] += 1

    def count_tokens(self, token_count: int) -> None:
        self._tokens[0] += np.uint64(token_count)

    @property
    def hits(self) -> int:
        return self._counters[0]

    @property
    def misses(self) -> int:
        return self._counters[1]

    @property
    def fetches(self) -> int:
        return self._counters[2]

    @property
    def tokens(self) -> int:
        return int(self._tokens[0])

    def note_own_lookups(self, hit_count: int, miss_count: int) -> None:
        """What there have been so far in slots of the client's own; for statistics."""
        self._own[:] = hit_count, miss_count

    @property
    def own_lookups(self) -> tuple[int, int]:
        hits, misses = self._own.tolist()
        return hits, misses

    # What routers choose, while the daemon traces

    def record(self, layer: int, experts: npt.NDArray[np.integer[Any]], use_count: int) -> None:
        """A section is about these experts (distinct), `use_count` choices of them all together."""
        record = np.empty(_RECORD_HEAD_CELLS + len(experts), np.uint16)
        record[:_RECORD_HEAD_CELLS] = layer, min(use_count, MAX_CELL), len(experts)
        record[_RECORD_HEAD_CELLS:] = experts
        written = int(self._recorded[0])
        at = written % RING_CELLS
        before_end = record[: RING_CELLS - at]
        self._ring[at : at + len(before_end)] = before_end
        self._ring[: len(record) - len(before_end)] = record[len(before_end) :]
        self._recorded[:] = written + len(record), self._recorded[1] + np.uint64(1)

    @property
    def recorded(self) -> tuple[int, int]:
        """Cells and records that have been written."""
        cells, records = self._recorded.tolist()
        return cells, records

    def recorded_cells(self, begin: int, end: int) -> npt.NDArray[np.uint16] | None:
        """A copy of the cells numbered so; None where some may have been overwritten meanwhile."""
        if end - begin > self._sound_cells or begin > end:
            return None
        cells = self._ring[np.arange(begin, end) % RING_CELLS]
        return cells if self.recorded[0] - begin <= self._sound_cells else None
