"""The daemon's slots as the client sees them: look experts up, wait for those that are missing.

docs/protocol.md is the law here. A hit is a look into shared memory and costs no message.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from infer.daemon.connection import Connection
from infer.daemon.mapping import Mapping
from infer.daemon.sections import Integers, Section, SectionReader
from infer.daemon.waits import Waits
from shared import membarrier
from shared.errors import ClientRevoked
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from shared.scan import USE_PARTS, is_scan, use_parts
from shared.wire import (
    GPU_TIER,
    HOST_TIER,
    MAX_HINT_EXPERTS,
    Failed,
    Fetch,
    Hint,
    Refused,
    Stats,
    StatsRequest,
)

# Longer than any sound disk takes for a wave; a daemon that hangs must not hang us.
FETCH_DEADLINE_S = 60.0
ANSWER_DEADLINE_S = 5.0
# A client of the GPU tier looks at the table for so long before it goes to sleep: uploads take less
# than that, and to be woken takes 60 to 90 us, for each layer again. The daemon needs a core too.
WATCH_S = 1e-3
WATCH_CORES = 4


def nothing_to_settle(_device: str) -> None:
    """A CPU is done with a slab when `compute` returns."""


class SlotClient(SectionReader):
    """One attachment to a daemon. Not for use by several threads.

    rows: the residency table's plane for our tier, int32 [n_layers, n_experts]; stretches: where
    gate, up and down of each slot lie, int64 [slots, 3]. Both change when it attaches again.
    tier: HOST_TIER or GPU_TIER. On a GPU all addresses are device addresses, and
    `settle(device)` waits until queued work is done: slots may be reused once a section has ended.
    """

    def __init__(
        self,
        name: str,
        index: GgufIndex,
        experts: ExpertIndex,
        tier: str = HOST_TIER,
        settle: Callable[[str], None] = nothing_to_settle,
    ) -> None:
        self.experts = experts
        self._tier = tier
        self._settle = settle
        self.waits = Waits()
        self._watches = tier == GPU_TIER and len(os.sched_getaffinity(0)) >= WATCH_CORES
        self._past_hits = self._past_misses = 0  # of earlier attachments
        self._use_parts = USE_PARTS  # what a choice counts now
        self._scans = False
        membarrier.register()
        self._connection = Connection(name, index, experts, tier)
        self._note_mapping()

    def _note_mapping(self) -> None:
        mapping = self._connection.mapping
        self.stretches = mapping.stretch_offsets + mapping.arena_address
        self.rows = mapping.table.plane_of(self._tier)

    @property
    def attached(self) -> bool:
        return self._connection.attached

    @property
    def mapping(self) -> Mapping:
        return self._connection.mapping

    def attach_again(self) -> None:
        """After ClientRevoked: a new attachment, with memory of its own.

        DaemonLost if it is the daemon that has gone: resident tensors lie elsewhere in the next.
        """
        self._connection.check_alive(at_once=True)
        self.detach()
        self._attach(self._connection.attach_when_there_is_room)

    def detach(self) -> None:
        """Leave the daemon and its memory; only `lookups` can be asked before `attach`."""
        self._past_hits, self._past_misses = self.lookups
        self.rows = np.empty((0, 0), np.int32)  # it keeps the table mapped
        self._connection.detach()

    def attach(self) -> None:
        """To the daemon of that name, whichever it is by now, which must serve the same file."""
        self._attach(self._connection.attach)

    def _attach(self, connect: Callable[[], None]) -> None:
        """Wholly or, where anything breaks in, not at all."""
        try:
            connect()
            self._note_mapping()
        except BaseException:
            self.detach()
            raise

    def wait_for_end(self, wake_fd: int) -> bool:
        """Until the daemon has ended, or `wake_fd` is readable: False. For another thread than
        the client's, which does not use it meanwhile."""
        return self._connection.wait_for_end(wake_fd)

    def close(self) -> None:
        self._connection.close()

    # Reading experts

    def expect(self, token_count: int) -> None:
        """What is read from now on is for so many tokens in one go: see shared/scan.py."""
        top_k, n_experts = self.experts.top_k, self.experts.n_experts
        self._use_parts = use_parts(token_count, top_k, n_experts)
        self._scans = is_scan(token_count, top_k, n_experts)
        if not self._scans and self.attached:
            self.mapping.area.scan_layer = None

    def wave_experts(self, layer: int) -> int:
        """The most experts of a layer that one section may need."""
        return self.mapping.attached.wave_experts[self.experts.layer_class[layer]]

    # One section, step by step

    def begin(self, layer: int, experts: Integers, use_counts: Integers | int) -> Section:
        self.enter()
        self.record(layer, experts, use_counts)
        return self.want(layer, experts, use_counts)

    def enter(self) -> None:
        """Begin a section, and so end the one before."""
        self._connection.check_alive()
        self.mapping.area.enter(self.mapping.table)

    def record(self, layer: int, experts: Integers, use_counts: Integers | int) -> None:
        """What a router has chosen, for a daemon that traces."""
        if self.mapping.table.tracing:
            use_count = int(np.broadcast_to(use_counts, experts.shape).sum())
            self.mapping.area.record(layer, experts, use_count)

    def want(self, layer: int, experts: Integers, use_counts: Integers | int) -> Section:
        """As `ask`, what it looks up being counted too."""
        area = self.mapping.area
        area.count_uses(layer, experts, use_counts, self._use_parts)
        section = self.ask(layer, experts)
        area.count_lookups(len(section.present), len(section.missing))
        return section

    def ask(self, layer: int, experts: Integers) -> Section:
        """Look up what the section just entered and counted needs; ask for what is missing."""
        area, row = self.mapping.area, self.rows[layer]
        number = area.section
        if self._scans:
            area.scan_layer = layer
        slots: npt.NDArray[np.int32] = row[experts]
        present, missing = (slots >= 0).nonzero()[0], (slots < 0).nonzero()[0]
        asked_s = time.perf_counter()
        if len(missing):
            self._connection.fetch(
                Fetch(self.mapping.attached.ticket, number, layer, experts[missing].tolist())
            )
            area.count_fetch()
        return Section(number, layer, experts, row, slots, present, missing, asked_s, len(missing))

    def wait_some(self, section: Section) -> npt.NDArray[np.intp]:
        """A granted miss is pinned, so none that has come to the table goes again."""
        deadline_s = time.monotonic() + FETCH_DEADLINE_S
        started_s = waited_s = time.perf_counter()
        while True:
            slots = section.row[section.experts[section.missing]]
            here = slots >= 0
            if here.any():
                arrived = section.missing[here]
                section.slots[arrived] = slots[here]
                section.missing = section.missing[~here]
                if waited_s > started_s:
                    self.waits.waited_s += waited_s - started_s
                    if not len(section.missing):
                        self.waits.served_s += waited_s - section.asked_s
                        self.waits.served_count += section.asked_count
                return arrived
            self.check_revoked()
            if self._watches and self._sees_arrival(section):
                waited_s = time.perf_counter()
                continue
            message = self._connection.next_message(deadline_s)
            waited_s = time.perf_counter()
            if isinstance(message, Failed) and message.section == section.number:
                raise Refused(message.code, message.message, message.remedy).error()

    def _sees_arrival(self, section: Section) -> bool:
        """Whether something that is missing comes within WATCH_S."""
        row, wanted = section.row, section.experts[section.missing]
        end_s = time.perf_counter() + WATCH_S
        while time.perf_counter() < end_s:
            if (row[wanted] >= 0).any():
                return True
        return False

    def addresses(self, section: Section, places: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        deltas = self.mapping.part_deltas[section.layer, section.experts[places]]
        return self.stretches[section.slots[places]] + deltas

    def settle(self) -> None:
        """Slots may be reused once a section has ended."""
        self._settle(self.mapping.device)

    def check_revoked(self) -> None:
        if self.mapping.table.revoked[self.mapping.attached.client]:
            raise ClientRevoked("the daemon serves this client no more", "attach again")

    def leave(self) -> None:
        if self.attached:
            self.mapping.area.leave()

    # Reading ahead

    @property
    def has_source(self) -> bool:
        return self._tier == GPU_TIER

    @property
    def drive_us(self) -> tuple[int, int]:
        return self.mapping.table.drive_us

    def unread(self, layer: int, experts: Integers) -> npt.NDArray[np.bool_]:
        host: npt.NDArray[np.bool_] = self.mapping.table.host_slots[layer][experts] < 0
        return host & self.absent(layer, experts)

    def hint(
        self, layer: int, experts: Integers, layers_ahead: int, upload_count: int | None = None
    ) -> None:
        """Tell the daemon which experts may be needed, the likeliest first; never answered.

        layers_ahead: how many sections after this one the layer is read. upload_count: the first
        ones, to be in a GPU slot as well as read, where our slots are a GPU's; None: all. Of more
        experts than a hint has room for the last ones are left out.
        """
        section = self.mapping.area.section + layers_ahead
        likeliest = experts[:MAX_HINT_EXPERTS].tolist()
        count = len(likeliest) if upload_count is None else upload_count
        self._connection.hint(Hint(self.mapping.attached.ticket, section, layer, likeliest, count))

    # Other requests

    def count_tokens(self, count: int) -> None:
        self.mapping.area.count_tokens(count)

    def tier_values(self, stats: dict[str, Any]) -> dict[str, Any]:
        """Of what `stats` has returned, the part about the slots that we compute from."""
        values: dict[str, Any] = stats["tiers"][self._tier]
        return values

    def uploads(self, stats: dict[str, Any]) -> tuple[int, int]:
        """Of what `stats` has returned: experts, and bytes, that went to the GPU, for whomever."""
        gpu = stats["tiers"][GPU_TIER]
        return gpu["uploads"], gpu["uploaded_bytes"]

    @property
    def lookups(self) -> tuple[int, int]:
        """Hits and misses so far."""
        if not self.attached:
            return self._past_hits, self._past_misses
        area = self.mapping.area
        return self._past_hits + area.hits, self._past_misses + area.misses

    def stats(self) -> dict[str, Any]:
        """The daemon's statistics, as in `streamd stats --json`."""
        self._connection.send(StatsRequest())
        deadline_s = time.monotonic() + ANSWER_DEADLINE_S
        while True:
            message = self._connection.next_message(deadline_s)
            if isinstance(message, Stats):
                return message.values
