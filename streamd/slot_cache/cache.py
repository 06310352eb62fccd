"""A tier's cache: docs/protocol.md's four rules, as pure policy.

It moves slot numbers between states and writes the residency table; reads, doorbells and sockets
are the daemon's. What it needs is given to it: table, clients' areas, barrier and clock.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from shared.errors import RequestError
from shared.residency import NONE_EPOCH, NOT_RESIDENT, ClientArea, ResidencyTable
from shared.slots import ClassSlots
from shared.wire import HOST_TIER
from streamd.readers.slab_read import Priority
from streamd.scheduling.heat import Heat
from streamd.slot_cache.cache_client import CacheClient
from streamd.slot_cache.cache_counters import CacheCounters
from streamd.slot_cache.eviction import Eviction
from streamd.slot_cache.grants import NO_WISHES, Grant, Step, Wishes
from streamd.slot_cache.reserve import Reserve

NO_CLASS = -1


class HostCache:
    """Slots of all size classes of one tier, shared by the clients that compute from them.

    The tiers' caches share the table's epoch and its flags; each has a plane of its own.
    tier: HOST_TIER or GPU_TIER.
    layer_class: size class of each layer, NO_CLASS where a layer has no experts.
    An expert's key is `layer * n_experts + expert`.
    ahead: slots given for a wish and held (pinned for nobody) until `release`, or until somebody
    asks for what is on its way there.
    """

    def __init__(
        self,
        table: ResidencyTable,
        layer_class: Sequence[int],
        classes: Sequence[ClassSlots],
        barrier: Callable[[], None],
        now_ms: Callable[[], float],
        tier: str = HOST_TIER,
    ) -> None:
        self.classes = tuple(classes)
        self._class_of_slot = [slots for slots in self.classes for _ in range(slots.count)]
        self.counters = CacheCounters()
        self.clients: dict[int, CacheClient] = {}
        self._asking: dict[int, CacheClient] = {}  # those that want something
        self.reading: dict[int, int] = {}  # key -> slot
        self.ahead: set[int] = set()
        self.table = table
        self.plane = table.plane_of(tier)
        self._cells = table.cells_of(tier)
        self._n_experts = table.shape.n_experts
        self.layer_class = tuple(layer_class)
        self._barrier = barrier
        self._now_ms = now_ms
        self.heat = Heat(table.shape.cell_count, table.shape.n_layers, now_ms)
        self.eviction = Eviction(table, tier, self.classes, self.heat, barrier, self.counters)
        self.reserve = Reserve(self.clients, tier)

    # Clients

    def attach(
        self,
        number: int,
        area: ClientArea,
        wave_limit: int | None = None,
        counts_uses: bool = True,
    ) -> None:
        """Let a client in, with its reserve made; DaemonBusy or PlanError where that cannot be."""
        assert number not in self.clients
        client = CacheClient(number, area, self._now_ms(), wave_limit, counts_uses)
        self.reserve.check_room(self.classes, client)
        if not client.ours:
            self.table.revoked[number] = 0
        self.clients[number] = client
        self.reserve.clients_changed()
        self.heat.join(client)
        self._retire()

    def detach(self, number: int) -> None:
        """Forget a client that has left, died or been revoked."""
        client = self.clients.pop(number)
        self.reserve.clients_changed()
        self.heat.leave(client)
        self.counters.departed_hits += client.area.hits
        self.counters.departed_tokens += client.area.tokens
        self._begin_section(client, client.section)

    def revoke(self, number: int) -> None:
        """Stop waiting for a client: it will see the flag before it uses what it has read."""
        self.table.revoked[number] = 1
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
        if not 0 <= layer < len(self.layer_class) or self.layer_class[layer] == NO_CLASS:
            raise RequestError(f"layer {layer} has no routed experts")
        if any(not 0 <= expert < self._n_experts for expert in experts):
            raise RequestError(f"an expert beyond 0..{self._n_experts - 1} of layer {layer}")
        if section < client.section:
            return  # the client has left it
        if section > client.section:
            self._begin_section(client, section)
        wave_experts = client.wave_experts(self.classes[self.layer_class[layer]])
        keys = {layer * self._n_experts + expert for expert in experts}
        given = {self.class_of_slot(slot).key_of(slot) for slot in client.pins}
        if len(keys | client.wanted | given) > wave_experts:
            raise RequestError(f"more than {wave_experts} experts wanted in one section")
        client.wanted |= keys
        if client.wanted:
            self._asking[number] = client
        client.still_since_ms = self._now_ms()
        self.counters.count_misses(layer, len(experts))

    @property
    def asking(self) -> Collection[CacheClient]:
        """Clients with a request that has no slot yet."""
        return self._asking.values()

    @property
    def waiting(self) -> bool:
        """Whether a request has no slot yet, so that another step may serve it."""
        return bool(self._asking)

    def step(self, room_count: int, wishes: Wishes = NO_WISHES) -> Step:
        """One step of the protocol: retire, see, reclaim, give. Reads are submitted after it.

        room_count: the most grants that can be submitted now.
        wishes: served last, of what nobody needs; keys that have a slot already are passed over.
        """
        step = Step()
        if not (self.waiting or wishes):
            return step
        self._retire(wishes)
        self.reclaim()
        for client in sorted(self.asking, key=lambda client: client.age):
            self._serve(client, room_count, step)
        if wishes.prefetch:
            self._give_ahead(wishes.prefetch, Priority.PREFETCH, room_count, step)
        if wishes.backfill and not self.waiting:
            self._give_ahead(wishes.backfill, Priority.BACKFILL, room_count, step)
        return step

    def read_done(self, slot: int) -> list[int]:
        """Publish a slot whose slab has arrived; the clients to ring."""
        slots = self.class_of_slot(slot)
        key = slots.key_of(slot)
        del self.reading[key]
        slots.publish(slot)
        self._cells[key] = slot
        waiting = [client for client in self.clients.values() if slot in client.pins]
        for client in waiting:
            client.still_since_ms = self._now_ms()
        return [client.number for client in waiting]

    def read_failed(self, slot: int) -> tuple[int, int, list[tuple[int, int]]]:
        """Free a slot whose read failed; its layer, expert, and who asked: (client, section)."""
        slots = self.class_of_slot(slot)
        key = slots.key_of(slot)
        del self.reading[key]
        waiting = [client for client in self.clients.values() if slot in client.pins]
        self.release(slot)
        for client in waiting:
            client.pins.remove(slot)
            slots.unpin(slot)
            client.still_since_ms = self._now_ms()
        slots.give_back(slot)
        return (*divmod(key, self._n_experts), [(c.number, c.section) for c in waiting])

    def release(self, slot: int) -> None:
        """Hold a slot that was given for a wish no longer: it may be a victim. Else nothing."""
        if slot in self.ahead:
            self.ahead.remove(slot)
            self.class_of_slot(slot).unpin(slot)

    # The parts of a step

    def _retire(self, wishes: Wishes = NO_WISHES) -> None:
        """Take victims out until every class has its reserve, and what is asked of it besides."""
        needed_counts = {slots: self.reserve.count(slots) for slots in self.classes}
        wanted = set[int]().union(*(client.wanted for client in self.asking))
        for key in wanted:
            needed_counts[self.class_of_key(key)] += not self.has_slot(key)
        if wishes.prefetch:
            wished_counts = Counter(self.class_of_key(k) for k in wishes.prefetch)
            for slots in self.classes:
                if slots.holds_all:
                    continue
                # None is left while a newcomer waits for what is held to land; demands go on.
                room_count = max(0, self.reserve.room_ahead(slots, self.ahead))
                spare_count = min(wishes.spare_count, room_count // 2)
                needed_counts[slots] += min(max(wished_counts[slots], spare_count), room_count)
        self.eviction.make_spare(needed_counts)

    def reclaim(self) -> None:
        """LIMBO -> FREE as far as the clients have moved on."""
        self._barrier()
        self._see_clients()
        oldest_epoch = min((c.published for c in self.clients.values()), default=NONE_EPOCH)
        for slots in self.classes:
            slots.reclaim(oldest_epoch)

    def _see_clients(self) -> None:
        """Read each client's area once, and drop the pins and requests of sections it has left."""
        for client in self.clients.values():
            # In this order: a section may be newer than the epoch it is seen with, never older.
            client.published = client.area.published
            section = client.area.section
            if section != client.section or (client.holds and not client.in_section):
                self._begin_section(client, section)

    def _begin_section(self, client: CacheClient, section: int) -> None:
        """Drop what belonged to the section before it."""
        for slot in client.pins:
            self.class_of_slot(slot).unpin(slot)
        client.pins.clear()
        client.wanted.clear()
        self._asking.pop(client.number, None)
        client.section = section
        client.still_since_ms = self._now_ms()

    def _serve(self, client: CacheClient, room_count: int, step: Step) -> None:
        """Give a client slots for what it waits for, as many as may be given."""
        wanted = sorted(client.wanted)
        shares = {
            slots: self.reserve.share_of_older(slots, client)
            for slots in set(map(self.class_of_key, wanted))
        }
        for key in wanted:
            layer, expert = divmod(key, self._n_experts)
            slots = self.class_of_key(key)
            slot = self._cells[key]
            if slot != NOT_RESIDENT:
                step.ring.add(client.number)
                client.still_since_ms = self._now_ms()
            elif key in self.reading:
                slot = self.reading[key]
                self.counters.joined_reads += 1
                if slot in self.ahead:
                    step.joined[slot] = client.number
            elif len(step.grants) < room_count and self.reserve.may_give(slots, shares[slots]):
                slot = slots.take(key)
                self.reading[key] = slot
                step.grants.append(Grant(slot, layer, expert, owner=client.number))
            else:
                continue
            client.wanted.remove(key)
            if slot not in client.pins:
                client.pins.add(slot)
                slots.pin(slot)
        if not client.wanted:
            del self._asking[client.number]
        for slot in step.joined:
            self.release(slot)

    def _give_ahead(
        self, keys: Sequence[int], priority: Priority, room_count: int, step: Step
    ) -> None:
        """Slots for what nobody waits for, as many as may be; held until `release`."""
        classes = set(map(self.class_of_key, keys))
        left = {slots: self.reserve.room_ahead(slots, self.ahead) for slots in classes}
        shares = {slots: self.reserve.share_of_all(slots) for slots in classes}
        for key in keys:
            slots = self.class_of_key(key)
            if len(step.grants) >= room_count or left[slots] <= 0 or self.has_slot(key):
                continue
            if not self.reserve.may_give(slots, shares[slots]):
                left[slots] = 0
                continue
            left[slots] -= 1
            slot = slots.take(key)
            slots.pin(slot)
            self.reading[key] = slot
            self.ahead.add(slot)
            step.grants.append(Grant(slot, *divmod(key, self._n_experts), priority))

    # Small things

    def has_slot(self, key: int) -> bool:
        return key in self.reading or self.slot_of(key) != NOT_RESIDENT

    def slot_of(self, key: int) -> int:
        """The slot that the table names, or NOT_RESIDENT."""
        slot: int = self._cells[key]
        return slot

    def class_of_key(self, key: int) -> ClassSlots:
        return self.classes[self.layer_class[key // self._n_experts]]

    def class_of_slot(self, slot: int) -> ClassSlots:
        return self._class_of_slot[slot]
