"""Uploads: what a read is to the host cache, an upload is to the GPU's.

An upload is one section of one expert in the host cache, of a client that is a part of the daemon:

    queued ---> lane: enter the section, look the expert up
                  | hit                         | miss: fetch, until the table has it, or it failed
                  v                             v
                copy to the GPU slot  <---------+
                  | done
                  v
                leave the section; the host slot may be reused

docs/protocol.md's rules then keep the host slot as it is while the copy reads it. The section needs
nothing that another client holds once its slab is there, so it always ends by itself.

What nobody waits for yet gets a lane when the last copy of what is waited for has begun: it is
queued behind that, and the bus does not stand still between the two, however late we see the one
end. Few of them at a time, since a demand waits for the copies that are under way when it comes;
one while the bus is idle and the drive has yet to bring what is waited for.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shared.arena import ArenaLayout
from shared.errors import StreamError
from shared.residency import MAX_CLIENTS, NOT_RESIDENT, ClientArea
from streamd.gpu.device import CopyQueue
from streamd.gpu.host_source import HostSource
from streamd.readers.slab_read import Priority
from streamd.scheduling.fair_queue import FairQueue
from streamd.slot_cache.cache import HostCache
from streamd.slot_cache.grants import Grant

# Slabs on their way at a time. They cost twice as many host slots of each class, and hide the
# drive's latency and that of the main loop.
LANE_COUNT = 16
# Of those, for what nobody waits for: two keep the bus busy.
AHEAD_LANE_COUNT = 2
QUEUE_LENGTH = 4096
# To begin a copy takes time in which nobody is told of what has ended; two keep the bus busy for
# longer than that.
COPIES_A_TURN = 2


@dataclass
class Lane:
    """One client of the host cache; `grant` says which GPU slot its section is for.

    host_slot: where it has seen its expert in this section; it may read there until the end of it,
    whatever the table says by then.
    """

    number: int
    area: ClientArea
    grant: Grant | None = None
    host_slot: int = NOT_RESIDENT
    copying: bool = False

    @property
    def is_demanded(self) -> bool:
        """Whether somebody waited for it when the lane was entered."""
        return self.grant is not None and self.grant.priority == Priority.DEMAND


class Uploaded(NamedTuple):
    """`slot`: of the GPU; with an error it holds no valid slab."""

    slot: int
    error: StreamError | None


class Uploads:
    """arena_address: where the GPU arena of `layout` begins."""

    def __init__(
        self,
        device: CopyQueue,
        cache: HostCache,
        source: HostSource,
        layout: ArenaLayout,
        arena_address: int,
        lane_count: int = LANE_COUNT,
    ) -> None:
        self._device = device
        self._cache = cache
        self._source = source
        self._n_experts = cache.table.shape.n_experts
        self._targets: list[list[int]] = (layout.stretches()[:, :, 0] + arena_address).tolist()
        self._demanded = FairQueue[Grant]()
        self._ahead: dict[int, Grant] = {}  # by slot, in order
        self._waiting: list[Lane] = []  # whose copies have not begun, in order
        self._ended: list[Uploaded] = []
        self._lanes = [self._attach_lane(MAX_CLIENTS + at) for at in range(lane_count)]
        self._free_lanes = list(self._lanes)
        # Of lanes: those that somebody waited for when they were entered, and the others.
        self._demanded_count = self._copying_count = self._ahead_count = 0
        self._uses = self._lanes[0].area.uses  # of all lanes
        self.uploaded_bytes = 0
        self.upload_count = 0

    def _attach_lane(self, number: int) -> Lane:
        shape = self._cache.table.shape
        area = ClientArea(bytearray(shape.area_bytes), shape)
        area.initialise()
        self._cache.attach(number, area, wave_limit=1, counts_uses=number == MAX_CLIENTS)
        return Lane(number, area)

    @property
    def eager(self) -> bool:
        """Whether somebody waits who could have a lane, others having ended since they were given,
        or for what has ended."""
        return bool(self._ended or (self._free_lanes and self._demanded))

    @property
    def room(self) -> int:
        """How many grants can be submitted now."""
        return QUEUE_LENGTH - len(self._demanded) - len(self._ahead)

    def submit(self, grant: Grant) -> None:
        """Bring an expert into a GPU slot; exactly one Uploaded comes from a later `poll`."""
        assert self.room > 0
        if grant.priority == Priority.DEMAND:
            self._demanded.append(grant.owner, grant)
        else:
            self._ahead[grant.slot] = grant

    def promote(self, slot: int, owner: int) -> None:
        """A client waits now for what comes into a GPU slot."""
        if grant := self._ahead.pop(slot, None):
            self._demanded.append(owner, grant._replace(priority=Priority.DEMAND, owner=owner))

    def withdraw(self, slot: int) -> bool:
        """Forget what comes into a GPU slot if it has no lane yet; whether it is forgotten."""
        return self._ahead.pop(slot, None) is not None

    def fetch_failed(self, number: int, section: int, error: StreamError) -> None:
        """The host cache cannot have what a lane waits for."""
        lane = self._lanes[number - MAX_CLIENTS]
        assert lane.area.section == section, "a lane stays in its section while it waits"
        self._waiting.remove(lane)
        self._end(lane, error)

    def enter_lanes(self) -> None:
        """Lanes for those whose turn it is. What is missing for them waits in the host cache.

        Before `go_on`, so that the drive is asked before more than one copy is begun, which takes
        0.1 ms each. What that enters the host cache fetches in its next step.
        """
        for _ in range(len(self._free_lanes)):
            if (grant := self._next()) is None:
                break
            lane = self._free_lanes.pop()
            self._enter(lane, grant)
            if not self._device.copying and self._can_copy(lane):
                self._copy(lane)  # the bus must not stand still meanwhile

    def poll(self) -> list[Uploaded]:
        """What has ended; to tell of it is more urgent than to `go_on`."""
        for number, error in self._device.reap():
            self._end(self._lanes[number - MAX_CLIENTS], error)
        ended, self._ended = self._ended, []
        return ended

    def go_on(self) -> None:
        """Begin what can begin. Misses wait for the host cache's next step.

        A fetched expert shows in the host table, so this is called after reads have ended.
        """
        self.enter_lanes()
        ready = [lane for lane in self._waiting if self._can_copy(lane)]
        for lane in ready[:COPIES_A_TURN]:
            self._copy(lane)

    def _next(self) -> Grant | None:
        """Whose turn it is to have a lane."""
        if self._demanded:
            return self._demanded.pop()
        if not self._ahead or self._ahead_count >= self._most_ahead():
            return None
        # What was hinted, and the host cache has lost since, waits until it is demanded or passes.
        may_go = (
            slot
            for slot, grant in self._ahead.items()
            if grant.priority != Priority.PREFETCH or self._host_slot(grant) != NOT_RESIDENT
        )
        slot = next(may_go, None)
        return None if slot is None else self._ahead.pop(slot)

    def _host_slot(self, grant: Grant) -> int:
        return self._cache.slot_of(grant.layer * self._n_experts + grant.expert)

    def _most_ahead(self) -> int:
        """How many lanes what nobody waits for may have now."""
        if self._demanded_count == self._copying_count:
            return AHEAD_LANE_COUNT
        if self._copying_count:
            return 0
        # The drive has yet to bring some of what is waited for, and will have soon.
        return 0 if any(self._can_copy(lane) for lane in self._waiting if lane.is_demanded) else 1

    def _enter(self, lane: Lane, grant: Grant) -> None:
        """Begin a lane's section, and have the host cache fetch what it lacks."""
        section = lane.area.enter(self._cache.table)
        lane.grant = grant
        if lane.is_demanded:
            self._demanded_count += 1
        else:
            self._ahead_count += 1
        self._uses[grant.layer, grant.expert] += np.uint32(1)
        is_hit = self._can_copy(lane)
        lane.area.count_lookups(int(is_hit), int(not is_hit))
        if not is_hit:
            self._cache.fetch(lane.number, section, grant.layer, [grant.expert])
        self._waiting.append(lane)

    def _can_copy(self, lane: Lane) -> bool:
        """Whether the host cache has, or had in this section, what a lane waits for."""
        grant = lane.grant
        assert grant is not None
        if lane.host_slot == NOT_RESIDENT:
            lane.host_slot = self._host_slot(grant)
        return lane.host_slot != NOT_RESIDENT

    def _copy(self, lane: Lane) -> None:
        grant = lane.grant
        assert grant is not None
        self._waiting.remove(lane)
        targets = self._targets[grant.slot]
        copies = self._source.copies(lane.host_slot, grant.layer, grant.expert, targets)
        lane.copying = True
        self._copying_count += lane.is_demanded
        try:
            self._device.submit(lane.number, copies)
        except StreamError as error:
            self._end(lane, error)
            return
        self.upload_count += 1
        self.uploaded_bytes += sum(copy.size_bytes for copy in copies)

    def _end(self, lane: Lane, error: StreamError | None) -> None:
        assert lane.grant is not None
        lane.area.leave()
        self._ended.append(Uploaded(lane.grant.slot, error))
        if lane.is_demanded:
            self._demanded_count -= 1
            self._copying_count -= lane.copying
        else:
            self._ahead_count -= 1
        self._free_lanes.append(lane)
        lane.grant = None
        lane.host_slot = NOT_RESIDENT
        lane.copying = False

    def close(self) -> None:
        """Nothing is read from host slots or written to the GPU any more."""
        self._device.drain()
        self._source.close()
