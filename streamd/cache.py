"""The host cache: docs/protocol.md's four rules, as pure policy.

It moves slot numbers between states and writes the residency table; reading the disk, ringing
doorbells and sockets are the daemon's. Everything it needs from outside is given to it: the table,
the clients' areas, the barrier and the clock.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared.errors import DaemonBusy, PlanError, RequestError
from shared.residency import MAX_CLIENTS, NONE_EPOCH, NOT_RESIDENT, ClientArea, ResidencyTable
from streamd.cache_client import CacheClient
from streamd.policy import LfuAgeing
from streamd.slots import ClassSlots, SlotState
from streamd.victims import VictimChooser

NO_CLASS = -1
# How old the clients' use counts may be when victims are chosen.
ABSORB_INTERVAL_MS = 5.0


@dataclass(frozen=True)
class Grant:
    """Read this expert into this slot."""

    slot: int
    layer: int
    expert: int


@dataclass
class Step:
    """What one step decided: reads to submit, and clients whose wait may be over."""

    grants: list[Grant] = field(default_factory=list)
    ring: set[int] = field(default_factory=set)


@dataclass
class CacheCounters:
    """Cumulative; of clients that have left, and of what the daemon itself does."""

    misses: int = 0
    evictions: int = 0
    joined_reads: int = 0
    revocations: int = 0
    departed_hits: int = 0
    departed_tokens: int = 0


class HostCache:
    """Slots of all size classes, shared by all clients.

    layer_class: size class of each layer, NO_CLASS where a layer has no experts.
    """

    def __init__(
        self,
        table: ResidencyTable,
        layer_class: Sequence[int],
        classes: Sequence[ClassSlots],
        barrier: Callable[[], None],
        now_ms: Callable[[], float],
    ) -> None:
        self.classes = tuple(classes)
        self.counters = CacheCounters()
        self.clients: dict[int, CacheClient] = {}
        self._table = table
        self._n_experts = table.shape.n_experts
        self._layer_class = tuple(layer_class)
        self._barrier = barrier
        self._now_ms = now_ms
        self._policy = LfuAgeing(table.shape.cell_count)
        self._choosers = [VictimChooser(c, self._policy, self._absorb_all) for c in self.classes]
        self._absorbed_at_ms = now_ms()
        # Experts that somebody waits for and that have no slot yet: key -> client -> section.
        self._wanted: dict[int, dict[int, int]] = {}
        self._reading: dict[int, int] = {}  # key -> slot

    # Clients

    def most_clients(self) -> int:
        """How many clients the slots allow; docs/protocol.md, Reserve."""
        bounded = [c.count // (2 * c.wave_experts) for c in self.classes if not c.holds_all]
        return min([MAX_CLIENTS, *bounded])

    def attach(self, number: int, area: ClientArea) -> None:
        """Let a client in, with its reserve made; DaemonBusy or PlanError where that cannot be."""
        assert number not in self.clients
        client_count = len(self.clients) + 1
        if client_count > MAX_CLIENTS:
            raise DaemonBusy(f"{MAX_CLIENTS} clients are attached, the most there may be")
        for slots in self.classes:
            if slots.holds_all:
                continue
            if slots.count < 2 * slots.wave_experts * client_count:
                raise PlanError(
                    f"a size class of the host cache has {slots.count} slots,"
                    f" {client_count} clients need {2 * slots.wave_experts * client_count}",
                    "restart the daemon with a larger --host-cache, or end another client",
                )
            if slots.retirable_count < slots.wave_experts * client_count:
                raise DaemonBusy("all slots are being read into", "try again in a moment")
        self._table.revoked[number] = 0
        self.clients[number] = CacheClient(number, area, self._now_ms())
        self._retire_to_reserve()

    def detach(self, number: int) -> None:
        """Forget a client that has left, died or been revoked."""
        client = self.clients.pop(number)
        self._absorb(client)
        self.counters.departed_hits += client.area.hits
        self.counters.departed_tokens += client.area.tokens
        self._unpin_all(client)
        for key in [key for key, asked in self._wanted.items() if number in asked]:
            self._withdraw(key, number)

    def revoke(self, number: int) -> None:
        """Stop waiting for a client: it will see the flag before it uses what it has read."""
        self._table.revoked[number] = 1
        self._barrier()
        self.counters.revocations += 1
        self.detach(number)

    # Requests

    def fetch(self, number: int, section: int, layer: int, experts: Iterable[int]) -> None:
        """Note that a client waits for `experts` in `section`; served by the next step.

        Raises RequestError for experts that do not exist or more than a section may need.
        """
        client = self.clients[number]
        experts = set(experts)
        if not 0 <= layer < len(self._layer_class) or self._layer_class[layer] == NO_CLASS:
            raise RequestError(f"layer {layer} has no routed experts")
        if any(not 0 <= expert < self._n_experts for expert in experts):
            raise RequestError(f"an expert beyond 0..{self._n_experts - 1} of layer {layer}")
        if client.section != section:
            self._begin_section(client, section)
        slots = self.classes[self._layer_class[layer]]
        waiting_count = sum(number in asked for asked in self._wanted.values())
        if len(experts) + waiting_count + len(client.pins) > slots.wave_experts:
            raise RequestError(f"more than {slots.wave_experts} experts wanted in one section")
        for expert in experts:
            self._wanted.setdefault(layer * self._n_experts + expert, {})[number] = section
        self.counters.misses += len(experts)

    @property
    def waiting(self) -> bool:
        """Whether a request has no slot yet, so that another step may serve it."""
        return bool(self._wanted)

    def step(self, room_count: int) -> Step:
        """One step of the protocol: see, reclaim, give, retire. Reads are submitted after it.

        room_count: the most grants that can be submitted now.
        """
        step = Step()
        if not self._wanted:
            return step
        self._barrier()
        self._see_clients()
        oldest_epoch = min((c.published for c in self.clients.values()), default=NONE_EPOCH)
        for slots in self.classes:
            slots.reclaim(oldest_epoch)
        for key in sorted(self._wanted, key=self._age_of_request):
            if len(step.grants) < room_count:
                self._serve(key, step)
        self._retire_to_reserve()
        return step

    def read_done(self, slot: int) -> list[int]:
        """Publish a slot whose slab has arrived; the clients to ring."""
        slots = self._class_of_slot(slot)
        key = slots.key_of(slot)
        del self._reading[key]
        slots.publish(slot)
        self._table.host_slots[divmod(key, self._n_experts)] = slot
        return [c.number for c in self.clients.values() if slot in c.pins]

    def read_failed(self, slot: int) -> tuple[int, int, list[tuple[int, int]]]:
        """Free a slot whose read failed; its layer, expert, and who asked: (client, section)."""
        slots = self._class_of_slot(slot)
        key = slots.key_of(slot)
        del self._reading[key]
        asked = [(c.number, c.section) for c in self.clients.values() if slot in c.pins]
        for number, _ in asked:
            self.clients[number].pins.remove(slot)
            slots.unpin(slot)
        slots.give_back(slot)
        return (*divmod(key, self._n_experts), asked)

    def stalled_clients(self, deadline_ms: float) -> list[int]:
        """Clients that block a waiting one and have not moved for `deadline_ms`.

        A client that itself waits for a slab is not stalled: we are.
        """
        if not self._wanted:
            return []
        youngest = max(self._age_of_request(key) for key in self._wanted)
        now_ms = self._now_ms()
        return [
            c.number
            for c in self.clients.values()
            if c.in_section
            and c.age < youngest
            and now_ms - c.seen_since_ms >= deadline_ms
            and not self._waits(c)
        ]

    # The parts of a step

    def _see_clients(self) -> None:
        """Read each client's area once, and drop the pins and requests of sections it has left."""
        for client in self.clients.values():
            published, section = client.area.published, client.area.section
            if (published, section) != (client.published, client.section):
                client.seen_since_ms = self._now_ms()
            client.published = published
            if section != client.section or published == NONE_EPOCH:
                self._begin_section(client, section)

    def _begin_section(self, client: CacheClient, section: int) -> None:
        self._unpin_all(client)
        client.section = section
        left = [
            key
            for key, asked in self._wanted.items()
            if client.number in asked and (asked[client.number] != section or not client.in_section)
        ]
        for key in left:
            self._withdraw(key, client.number)

    def _withdraw(self, key: int, number: int) -> None:
        del self._wanted[key][number]
        if not self._wanted[key]:
            del self._wanted[key]

    def _age_of_request(self, key: int) -> tuple[int, int]:
        return min(self.clients[number].age for number in self._wanted[key])

    def _serve(self, key: int, step: Step) -> None:
        layer, expert = divmod(key, self._n_experts)
        slots = self.classes[self._layer_class[layer]]
        resident_slot = int(self._table.host_slots[layer, expert])
        if resident_slot != NOT_RESIDENT:
            slot = resident_slot
            step.ring.update(self._wanted[key])
        elif key in self._reading:
            slot = self._reading[key]
            self.counters.joined_reads += 1
        elif self._may_give(slots, self._age_of_request(key)):
            slot = slots.take(key)
            self._reading[key] = slot
            step.grants.append(Grant(slot, layer, expert))
        else:
            return
        for number in self._wanted.pop(key):
            self.clients[number].pins.add(slot)
            slots.pin(slot)

    def _may_give(self, slots: ClassSlots, age: tuple[int, int]) -> bool:
        """The reserve: older sections keep their share, and the reserve can be kept up."""
        if slots.holds_all:
            return bool(slots.free)
        share_of_older = sum(
            max(0, slots.wave_experts - sum(slots.owns(slot) for slot in client.pins))
            for client in self.clients.values()
            if client.in_section and client.age < age
        )
        reserve_count = slots.wave_experts * len(self.clients)
        return len(slots.free) > share_of_older and slots.retirable_count > reserve_count

    def _retire_to_reserve(self) -> None:
        victims: list[tuple[ClassSlots, int]] = []
        for slots, chooser in zip(self.classes, self._choosers, strict=True):
            if slots.holds_all:
                continue
            missing_count = slots.wave_experts * len(self.clients) - slots.spare_count
            for slot in chooser.choose(missing_count):
                self._table.host_slots[divmod(slots.key_of(slot), self._n_experts)] = NOT_RESIDENT
                victims.append((slots, slot))
        if not victims:
            return
        self._barrier()
        self._table.epoch += 1
        for slots, slot in victims:
            slots.retire(slot, self._table.epoch)
        self._barrier()
        self.counters.evictions += len(victims)

    # Small things

    def _absorb_all(self) -> None:
        now_ms = self._now_ms()
        if now_ms - self._absorbed_at_ms >= ABSORB_INTERVAL_MS:
            self._absorbed_at_ms = now_ms
            for client in self.clients.values():
                self._absorb(client)

    def _absorb(self, client: CacheClient) -> None:
        uses: npt.NDArray[np.uint32] = client.area.uses.reshape(-1).copy()
        self._policy.absorb(uses - client.absorbed_uses)
        client.absorbed_uses = uses

    def _unpin_all(self, client: CacheClient) -> None:
        for slot in client.pins:
            self._class_of_slot(slot).unpin(slot)
        client.pins.clear()

    def _waits(self, client: CacheClient) -> bool:
        return any(client.number in asked for asked in self._wanted.values()) or any(
            self._class_of_slot(slot).state_of(slot) == SlotState.READING for slot in client.pins
        )

    def _class_of_slot(self, slot: int) -> ClassSlots:
        return next(slots for slots in self.classes if slots.owns(slot))
