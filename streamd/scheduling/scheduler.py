"""Who may have a tier's slots and its bandwidth next: demands, then hints, then what is idle.

    demand     at once; it joins what is on its way already, and takes that to the front
    prefetch   what a client has hinted: never of the reserve, a bounded share of the slots
    backfill   the hottest experts that are not there, into FREE slots, while nothing is demanded

One step of the cache's protocol decides; a carrier (disk reads, or uploads) has one budget of
bytes in flight and lets a lower priority begin only while no higher one waits. Pure policy.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from shared.experts import ExpertIndex
from shared.residency import NOT_RESIDENT, ClientArea
from streamd.readers.slab_read import Priority
from streamd.scheduling.backfill import Backfill
from streamd.scheduling.prefetch import Prefetch
from streamd.slot_cache.cache import NO_CLASS, HostCache
from streamd.slot_cache.grants import Grant, Step, Wishes

# Wishes handed to the cache in one step.
MAX_WISHES = 32
# When there were not enough slots for them, or none of them could come, they are tried again so
# much later, sooner if something has happened: the main loop may turn every 50 us.
RETRY_MS = 0.5


class Carrier(Protocol):
    """Brings slabs into slots; exactly one end of each is told, unless it was withdrawn."""

    @property
    def room(self) -> int: ...

    def submit(self, grant: Grant) -> None: ...

    def promote(self, slot: int, owner: int) -> None:
        """A client waits now for what comes into `slot`."""

    def withdraw(self, slot: int) -> bool:
        """Forget what comes into `slot` if nothing of it has begun; whether it is forgotten."""


class Scheduler:
    """Of one tier. slab_bytes: of each layer's experts.

    source: the tier that slabs come from, None for the disk. What is not there yet is hinted there
    first: to bring it takes its own time and must not hold up a demand of this tier meanwhile.
    warm: whether an idle tier is filled.
    """

    def __init__(
        self,
        cache: HostCache,
        carrier: Carrier,
        slab_bytes: tuple[int, ...],
        now_ms: Callable[[], float],
        source: "Scheduler | None" = None,
        warm: bool = True,
    ) -> None:
        self.cache = cache
        n_experts = cache.table.shape.n_experts
        self.prefetch = Prefetch(lambda key: slab_bytes[key // n_experts], cache.heat.uses_of)
        self.backfill = Backfill(cache, lambda key: slab_bytes[key // n_experts], now_ms)
        self.backfill.stopped = not warm
        self._n_experts = n_experts
        self._carrier = carrier
        self._now_ms = now_ms
        self._wish_at_ms = 0.0
        self._source = source
        self._source_landed_count = 0  # when wishes were last looked through
        self.landed_count = 0

    # What clients say

    def attach(self, number: int, area: ClientArea) -> None:
        """Let a client in; who comes is more than what somebody may need. PlanError, DaemonBusy."""
        for slot in self.prefetch.there():
            self._judge(slot)
        self.cache.attach(number, area)

    def hint(
        self,
        number: int,
        area: ClientArea,
        section: int,
        layer: int,
        experts: Sequence[int],
        upload_count: int,
    ) -> None:
        """A client may need experts in that section of its own, the likeliest first.

        upload_count: those beyond only of the tier that slabs come from, where there is one. What
        makes no sense is ignored.
        """
        cache = self.cache
        layers = cache.layer_class
        if not 0 <= layer < len(layers) or layers[layer] == NO_CLASS:
            return
        row = cache.plane[layer]
        missing = [e for e in experts if 0 <= e < self._n_experts and row[e] == NOT_RESIDENT]
        wanted = set(missing if self._source is None else experts[: max(0, upload_count)])
        keys = [layer * self._n_experts + expert for expert in missing if expert in wanted]
        keys = [k for k in keys if k not in cache.reading or cache.reading[k] in self.prefetch]
        self.prefetch.hint(number, area, section, keys, self._now_ms())
        self._wish_at_ms = 0.0
        if self._source is not None:
            self._source.hint(number, area, section, layer, missing, upload_count)

    def fetch(self, number: int, section: int, layer: int, experts: Sequence[int]) -> None:
        """A client waits for experts, all that it lacks in a section; see HostCache.fetch."""
        self.cache.fetch(number, section, layer, experts)
        self.prefetch.asked(number, section)

    def forget(self, number: int) -> None:
        """A client has gone."""
        self.prefetch.forget(number)
        if self._source is not None:
            self._source.forget(number)

    # What the main loop does

    @property
    def waiting(self) -> bool:
        """Whether another step may do something although nothing has been heard."""
        return self.cache.waiting or self.prefetch.pending or self.backfill.eager

    def step(self) -> set[int]:
        """One step of the protocol; what it grants is brought. Clients to ring.

        Who waits is served at once; what was hinted has time until the next turn.
        """
        waited = self.cache.waiting
        ring = self.serve()
        if waited and not self.cache.waiting:
            return ring
        now_ms = self._now_ms()
        self._drop_passed(now_ms)
        if wishes := self._wishes(now_ms):
            step = self.cache.step(self._carrier.room, wishes)
            if len(step.grants) < len(wishes.prefetch):
                self._wish_at_ms = now_ms + RETRY_MS
            ring |= self._carry(step)
        else:
            self.cache.eviction.prepare()
        return ring

    def serve(self) -> set[int]:
        """The part of a step that somebody waits for. Clients to ring."""
        if not self.cache.waiting:
            return set()
        now_ms = self.backfill.demanded_at_ms = self._now_ms()
        ring = self._carry(self.cache.step(self._carrier.room))
        self._drop_passed(now_ms)  # before any of it is begun
        return ring

    def _carry(self, step: Step) -> set[int]:
        """Have brought what has been granted. Clients to ring."""
        for slot, number in step.joined.items():
            self.prefetch.joined(slot)
            self.backfill.joined(slot)
            self._carrier.promote(slot, number)
        for grant in step.grants:
            key = grant.layer * self._n_experts + grant.expert
            match grant.priority:
                case Priority.DEMAND:
                    self.prefetch.demanded(key)
                case Priority.PREFETCH:
                    self.prefetch.given(key, grant.slot)
                case Priority.BACKFILL:
                    self.backfill.given(key, grant.slot)
            self._carrier.submit(grant)
        return step.ring

    def landed(self, slot: int) -> list[int]:
        """A slab is there: the clients to ring."""
        cache = self.cache
        self.landed_count += 1
        ring = cache.read_done(slot)
        self._wish_at_ms = 0.0
        if self.backfill.landed(slot):
            cache.release(slot)
        elif self.prefetch.landed(slot) and self._lacks_room(slot):
            self._judge(slot)  # a client has come since: it needs its floor
        return ring

    def failed(self, slot: int) -> tuple[int, int, list[tuple[int, int]]]:
        """A slab will not come: its layer, expert, and who asked: (client, section)."""
        self.prefetch.failed(slot, self._now_ms())
        self.backfill.failed(slot)
        return self.cache.read_failed(slot)

    # The parts of a step

    def _drop_passed(self, now_ms: float) -> None:
        if not self.prefetch.pending:
            return
        for hinted in self.prefetch.passed(now_ms):
            slot = hinted.slot
            assert slot is not None
            if hinted.is_there:
                self._judge(slot)
            elif self._carrier.withdraw(slot):
                self.prefetch.withdrawn(slot)
                self.cache.read_failed(slot)

    def _lacks_room(self, slot: int) -> bool:
        cache = self.cache
        return cache.reserve.room_ahead(cache.class_of_slot(slot), cache.ahead) < 0

    def _judge(self, slot: int) -> None:
        self.cache.release(slot)
        if not self.prefetch.judge(slot):
            self.cache.eviction.offer(self.cache.class_of_slot(slot), slot)

    def _wishes(self, now_ms: float) -> Wishes:
        hinted: tuple[int, ...] = ()
        if self.prefetch.waiting and (now_ms >= self._wish_at_ms or self._source_has_more()):
            hinted = self.prefetch.wishes(MAX_WISHES, self._may_come)
            self._wish_at_ms = 0.0 if hinted else now_ms + RETRY_MS
        idle = not (self.cache.waiting or self.prefetch.pending)
        cold = self.backfill.wishes(self._is_at_hand) if idle else ()
        return Wishes(hinted, self.prefetch.spare_count(now_ms), cold)

    def _source_has_more(self) -> bool:
        """Whether something has come to the tier that slabs come from since this was last asked."""
        before = self._source_landed_count
        if self._source is not None:
            self._source_landed_count = self._source.landed_count
        return self._source_landed_count != before

    def _may_come(self, key: int) -> bool:
        return not self.cache.has_slot(key) and self._is_at_hand(key)

    def _is_at_hand(self, key: int) -> bool:
        """Whether the tier that it comes from has it."""
        if self._source is None:
            return True
        return self._source.cache.slot_of(key) != NOT_RESIDENT


def layer_slab_bytes(experts: ExpertIndex) -> tuple[int, ...]:
    """Bytes of a slab of each layer, 0 where a layer has no experts."""
    classes = experts.layer_class.tolist()
    return tuple(0 if c == NO_CLASS else experts.classes[c].slab_bytes for c in classes)
