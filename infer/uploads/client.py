r"""A client of the host tier that computes from GPU slots of its own.

    router's choice ---> own slots: those that are there are computed at once
                    \--> host slots, in a section of docs/protocol.md's: fetched where missing
                            | as they come
                            v
                         copies to slots that nobody else has; kernels wait for them on the GPU
                            | the last is done, and nothing was overwritten under it
                            v
                         the host section ends, the own slots are published

What the host must wait for is the end of the copies. That a slot is not overwritten under a kernel
is left to the GPU: a copy begins behind the section that has read its slot last.
"""

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from infer.daemon.client import SlotClient
from infer.daemon.mapping import Mapping
from infer.daemon.sections import Integers, Section, SectionReader
from infer.daemon.waits import Waits
from infer.uploads.bounce import BounceRing
from infer.uploads.device import UploadDevice
from infer.uploads.host_slots import HostSlots
from infer.uploads.own_memory import OwnMemory
from infer.uploads.upload_section import Uploads, UploadSection
from shared.arena import PART_COUNT
from shared.device_copies import Copy
from shared.residency import NOT_RESIDENT
from shared.scan import USE_PARTS, use_parts

# Of sections, the last so many; what waits for an older one waits for a newer one instead.
EVENT_COUNT = 64


class UploadingClient(SectionReader):
    """See infer.daemon.client.SlotClient, whose place it takes. Closes `host`.

    mapping: with a table and an area that nobody else has; `rows` is of that table. Both stay when
    it attaches again, as do the slots: they belong to the file, not to the daemon.
    """

    def __init__(
        self, host: SlotClient, device: UploadDevice, own: OwnMemory, bounce: BounceRing
    ) -> None:
        self.experts = host.experts
        self.own, self.cache = own, own.cache
        self.rows, self.stretches = own.rows, own.stretches
        self._area = own.area
        self._host, self._device, self._bounce = host, device, bounce
        self._use_parts = USE_PARTS
        self._number = 1  # of the present section, or of the next
        self._entered = -1  # the area's number of the present section
        self._read = [device.event() for _ in range(EVENT_COUNT)]
        self._copied = device.event()
        self._open: list[Uploads] = []  # all of one host section
        self._torn = False  # something was broken off, by Ctrl-C or an error, at any place
        self.upload_count = self.uploaded_bytes = 0
        self._note_host()

    def _note_host(self) -> None:
        mapping = self._host.mapping
        self._slots: HostSlots | None = HostSlots(self._device, self._bounce, mapping, self.experts)
        self._mapping: Mapping | None = self.own.mapping(mapping)

    # The daemon

    @property
    def attached(self) -> bool:
        return self._mapping is not None

    @property
    def mapping(self) -> Mapping:
        assert self._mapping is not None
        return self._mapping

    @property
    def waits(self) -> Waits:
        return self._host.waits

    def attach_again(self) -> None:
        self._let_go()
        self._host.attach_again()
        self._note_host()

    def attach(self) -> None:
        self._host.detach()  # it is still attached where `attach_again` was broken off
        self._host.attach()
        self._note_host()

    def detach(self) -> None:
        try:
            self._let_go()
        finally:
            self._host.detach()

    def _let_go(self) -> None:
        """Of the host's memory, which copies may be reading."""
        try:
            self._end_section()
        finally:
            if self._slots is not None:
                self._slots.close()
            self._slots = self._mapping = None

    def wait_for_end(self, wake_fd: int) -> bool:
        return self._host.wait_for_end(wake_fd)

    def close(self) -> None:
        try:
            self._let_go()
        finally:
            self._host.close()

    # A section

    def expect(self, token_count: int) -> None:
        self._host.expect(token_count)
        self._use_parts = use_parts(token_count, self.experts.top_k, self.experts.n_experts)

    def wave_experts(self, layer: int) -> int:
        """So many that the next ones can be uploaded meanwhile, unless there is a slot for each."""
        slot_count = self.cache.slot_count(layer)
        if not self.cache.holds_all(layer):
            slot_count = max(self.experts.top_k, slot_count // 2)
        return min(slot_count, self._host.wave_experts(layer))

    def begin(self, layer: int, experts: Integers, use_counts: Integers | int) -> Section:
        self._area.enter(self.own.table)
        self._area.count_uses(layer, experts, use_counts, self._use_parts)
        self._host.record(layer, experts, use_counts)
        section = self.ask(layer, experts, use_counts)
        self._area.count_lookups(len(section.present), len(section.missing))
        return section

    def ask(self, layer: int, experts: Integers, use_counts: Integers | int = 1) -> Section:
        """Look up what the section just entered and counted needs; upload what is missing.

        It may be asked several times in a section. Who has entered it by other means than `begin`
        has seen the GPU do the work of the sections before.
        """
        number = self._area.section
        if number != self._entered:
            self._end_section()
            self._entered = number
        self._torn = True
        row = self.rows[layer]
        slots: npt.NDArray[np.int32] = row[experts]
        is_here = slots != NOT_RESIDENT
        present, missing = is_here.nonzero()[0], (~is_here).nonzero()[0]
        self.cache.hold(layer, slots[present])
        asked = time.perf_counter(), len(missing)
        section = UploadSection(number, layer, experts, row, slots, present, missing, *asked)
        if len(missing):
            counts = np.broadcast_to(use_counts, experts.shape)
            self._begin_uploads(section, counts[missing])
        self._torn = False
        return section

    def _begin_uploads(self, section: UploadSection, use_counts: Integers) -> None:
        layer, missing = section.layer, section.missing
        if not self._open:
            self._host.enter()
        host = self._host.want(layer, section.experts[missing], use_counts)
        targets = self.cache.claim(layer, host.experts)
        section.slots[missing] = targets
        section.uploads = uploads = Uploads(host, missing, targets)
        self._open.append(uploads)
        if last_reader := self.cache.last_reader(targets):
            self._device.copying.wait_event(self._read[last_reader % EVENT_COUNT])
        if len(host.present):
            self._copy(uploads, host.present)

    def _copy(self, uploads: Uploads, places: npt.NDArray[np.intp]) -> None:
        """Queue what has come to the host's slots."""
        host = uploads.host
        sizes = self.experts.classes[self.experts.layer_class[host.layer]].part_bytes
        sources = self._host.addresses(host, places).tolist()
        targets = self.stretches[uploads.targets[places]].tolist()
        assert self._slots is not None
        for place, source, target in zip(places.tolist(), sources, targets, strict=True):
            copies = [Copy(target[part], source[part], sizes[part]) for part in range(PART_COUNT)]
            self._slots.copy(int(host.slots[place]), copies)
        self._copied.record(self._device.copying)
        uploads.ready += uploads.places[places].tolist()
        self.upload_count += len(places)
        self.uploaded_bytes += len(places) * sum(sizes)

    def wait_some(self, section: Section) -> npt.NDArray[np.intp]:
        """What is launched from here on waits for the copies of these."""
        assert isinstance(section, UploadSection)
        uploads = section.uploads
        assert uploads is not None
        self._torn = True
        if not uploads.ready:
            self._copy(uploads, self._host.wait_some(uploads.host))
        self._device.computing().wait_event(self._copied)
        arrived = np.array(uploads.ready, np.intp)
        uploads.ready.clear()
        section.missing = np.setdiff1d(section.missing, arrived)
        if not len(section.missing):
            self._finish(uploads)
        self._torn = False
        return arrived

    def _finish(self, uploads: Uploads) -> None:
        """All is queued: when it is done, and if nothing was overwritten before, it is ours."""
        self._copied.synchronize()
        self._host.check_revoked()
        for slot in uploads.targets.tolist():
            self.cache.publish(slot)
        self._open.remove(uploads)
        if not self._open:
            self._host.leave()

    def addresses(self, section: Section, places: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        return self.stretches[section.slots[places]]

    def settle(self) -> None:
        """The GPU itself keeps slots from being overwritten under kernels."""

    def check_revoked(self) -> None:
        """What is in own slots is sound; but a daemon that serves this client no more says why."""
        self._host.check_revoked()

    def leave(self) -> None:
        self._end_section()

    def _end_section(self) -> None:
        """What reads its slots has been launched; what has not come will not come any more."""
        is_whole = not (self._torn or self._open)
        self._torn = True
        number = self._number
        try:
            if self.cache.held:
                self._read[number % EVENT_COUNT].record(self._device.computing())
                self._number += 1
            if is_whole:
                self.cache.release(number)
            else:
                self._copied.record(self._device.copying)
                self._copied.synchronize()
                self.cache.rebuild(number)
                self._open.clear()
        finally:
            self._host.leave()
        self._torn = False

    # Reading ahead

    has_source = True

    @property
    def drive_us(self) -> tuple[int, int]:
        return self._host.drive_us

    def unread(self, layer: int, experts: Integers) -> npt.NDArray[np.bool_]:
        return self.absent(layer, experts) & self._host.absent(layer, experts)

    def hint(
        self,
        layer: int,
        experts: Integers,
        layers_ahead: int,
        upload_count: int | None = None,  # noqa: ARG002 - a HintSink's
    ) -> None:
        """What the host has not; what it has is uploaded when it is asked for."""
        wanted = experts[self._host.absent(layer, experts)]
        if len(wanted):
            self._host.hint(layer, wanted, layers_ahead)

    # Other requests

    @property
    def lookups(self) -> tuple[int, int]:
        """Hits and misses of own slots so far."""
        return self._area.hits, self._area.misses

    def record(self, layer: int, experts: Integers, use_counts: Integers | int) -> None:
        self._host.record(layer, experts, use_counts)

    def count_tokens(self, count: int) -> None:
        self._host.count_tokens(count)
        self._host.mapping.area.note_own_lookups(*self.lookups)

    def stats(self) -> dict[str, Any]:
        return self._host.stats()

    def tier_values(self, _stats: dict[str, Any]) -> dict[str, Any]:
        """Of own slots, which the daemon knows nothing of."""
        hits, misses = self.lookups
        return {"hits": hits, "misses": misses, "evictions": self.cache.eviction_count}

    def uploads(self, _stats: dict[str, Any]) -> tuple[int, int]:
        """Experts that went to own slots so far, and bytes."""
        return self.upload_count, self.uploaded_bytes
