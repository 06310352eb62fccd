"""Clients, hints, backfill and a drive in any order, over the scheduler and its real cache.

The reference is what a client sees: the slots that it reads hold what the table says, from the
lookup to the end of its section, and everybody who waits is served in the end.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shared.errors import DaemonBusy, PlanError
from shared.residency import NOT_RESIDENT, ClientArea, ResidencyTable, TableShape
from shared.slots import ClassSlots
from streamd.scheduling.prefetch import HINT_AGE_MS
from streamd.scheduling.scheduler import Scheduler
from streamd.slot_cache.cache import HostCache
from streamd.slot_cache.cache_integrity import check_integrity
from streamd.slot_cache.grants import Grant

N_LAYERS, N_EXPERTS, WAVE = 2, 4, 1
MOST_CLIENTS = 2
SLAB_BYTES = 100
# Steps and landings by turns within which everybody who waits is served.
ROUNDS = 60

experts_of = st.permutations(range(N_EXPERTS)).map(lambda order: order[:WAVE])
layers = st.integers(0, N_LAYERS - 1)


class Carrier:
    """What is on its way; a slab that has begun can be withdrawn no more. contents: of slots."""

    room = 100

    def __init__(self) -> None:
        self.waiting: dict[int, Grant] = {}
        self.begun: dict[int, Grant] = {}
        self.contents: dict[int, int] = {}
        self.read_by: dict[int, int] = {}  # slots that clients read: how many of them do

    def submit(self, grant: Grant) -> None:
        assert grant.slot not in self.waiting.keys() | self.begun.keys()
        assert not self.read_by.get(grant.slot), "overwritten while somebody reads it"
        self.contents.pop(grant.slot, None)
        self.waiting[grant.slot] = grant

    def promote(self, slot: int, owner: int) -> None:
        assert slot in self.waiting.keys() | self.begun.keys()

    def withdraw(self, slot: int) -> bool:
        return self.waiting.pop(slot, None) is not None


@dataclass
class Client:
    """layer, experts: of the section it is in; slots: those that it may read by now."""

    number: int
    area: ClientArea
    layer: int = -1
    experts: list[int] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)  # expert -> slot


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(extra=st.integers(0, 3), warm=st.booleans(), full=st.booleans())
    def start(self, extra, warm, full):
        shape = TableShape(N_LAYERS, N_EXPERTS)
        self.shape = shape
        self.table = ResidencyTable(bytearray(shape.table_bytes), shape)
        self.table.initialise()
        self.now_ms = 0.0
        slots = ClassSlots(0, 2 * WAVE * MOST_CLIENTS + extra, shape.cell_count, WAVE)
        clock = lambda: self.now_ms  # noqa: E731
        self.cache = HostCache(self.table, [0] * N_LAYERS, [slots], lambda: None, clock)
        self.carrier = Carrier()
        sizes = (SLAB_BYTES,) * N_LAYERS
        self.scheduler = Scheduler(self.cache, self.carrier, sizes, clock, warm=warm)
        self.clients: dict[int, Client] = {}
        for number in range(MOST_CLIENTS):
            self.comes(number)
        self.cache.heat.policy.heat[:] = range(N_LAYERS * N_EXPERTS)  # as earlier runs say
        for key in range(N_LAYERS * N_EXPERTS if full else 0):
            self.enters(0, key // N_EXPERTS, [key % N_EXPERTS])
            self.drive_catches_up()

    @rule(number=st.integers(0, MOST_CLIENTS - 1))
    def comes(self, number):
        if number in self.clients:
            return
        area = ClientArea(bytearray(self.shape.area_bytes), self.shape)
        area.initialise()
        try:
            self.scheduler.attach(number, area)
        except (DaemonBusy, PlanError):
            return
        self.clients[number] = Client(number, area)

    @rule(number=st.integers(0, MOST_CLIENTS - 1))
    def dies(self, number):
        if client := self.clients.pop(number, None):
            self._let_go(client)
            self.scheduler.forget(number)
            self.cache.detach(number)

    @rule(number=st.integers(0, MOST_CLIENTS - 1), layer=layers, experts=experts_of)
    def enters(self, number, layer, experts):
        """A new section, whatever became of the last one."""
        if (client := self.clients.get(number)) is None:
            return
        self._let_go(client)
        client.area.enter(self.table)
        client.layer, client.experts = layer, experts
        client.area.uses[layer, experts] += np.uint32(1)
        self._look(client)
        if missing := [expert for expert in experts if expert not in client.slots]:
            self.cache.fetch(number, client.area.section, layer, missing)

    @rule(number=st.integers(0, MOST_CLIENTS - 1))
    def leaves(self, number):
        if client := self.clients.get(number):
            self._let_go(client)
            client.area.leave()

    @rule(
        number=st.integers(0, MOST_CLIENTS - 1),
        layer=st.integers(-1, N_LAYERS),
        experts=st.lists(st.integers(-1, N_EXPERTS), max_size=4),
        ahead=st.integers(-1, 3),
    )
    def hints(self, number, layer, experts, ahead):
        if client := self.clients.get(number):
            section = client.area.section + ahead
            self.scheduler.hint(number, client.area, section, layer, experts, len(experts))

    @rule()
    def step(self):
        self.scheduler.step()

    @rule()
    def drive_catches_up(self):
        self.scheduler.step()
        self._land_all()
        self.scheduler.step()

    @precondition(lambda self: self.carrier.waiting)
    @rule(count=st.integers(1, 3))
    def drive_begins(self, count):
        for slot in list(self.carrier.waiting)[:count]:
            self.carrier.begun[slot] = self.carrier.waiting.pop(slot)

    @precondition(lambda self: self.carrier.begun)
    @rule(fails=st.booleans())
    def drive_ends(self, fails):
        self._end(next(iter(self.carrier.begun)), fails)

    @rule(elapsed_ms=st.sampled_from([1.0, 25.0, HINT_AGE_MS]))
    def time_passes(self, elapsed_ms):
        self.now_ms += elapsed_ms

    @invariant()
    def everything_agrees(self):
        check_integrity(self.cache)
        on_their_way = self.carrier.waiting.keys() | self.carrier.begun.keys()
        assert set(self.cache.reading.values()) == on_their_way
        for client in self.clients.values():
            self._look(client)
        counters = self.scheduler.prefetch.counters
        waiting_count = len(self.scheduler.prefetch._waiting)
        verdicts = counters.useful + counters.late + counters.wasted + counters.failed
        given_count = len(self.scheduler.prefetch._given)
        assert counters.hinted == (
            counters.expired + counters.demanded + counters.issued + waiting_count
        )
        assert counters.issued == verdicts + counters.withdrawn + given_count

    def teardown(self):
        """Everybody who waits is served."""
        if not hasattr(self, "carrier"):
            return
        for _ in range(ROUNDS):
            self.scheduler.step()
            self._land_all()
            for client in self.clients.values():
                self._look(client)
                if len(client.slots) == len(client.experts):
                    self._let_go(client)
                    client.area.leave()
        assert not any(client.experts for client in self.clients.values()), "somebody starves"

    # What clients see

    def _look(self, client: Client) -> None:
        """Slots that are named now are the client's to read until its section ends."""
        for expert in client.experts:
            slot = int(self.table.host_slots[client.layer, expert])
            key = client.layer * N_EXPERTS + expert
            if expert in client.slots:
                assert self.carrier.contents[client.slots[expert]] == key
            elif slot != NOT_RESIDENT:
                assert self.carrier.contents[slot] == key
                client.slots[expert] = slot
                self.carrier.read_by[slot] = self.carrier.read_by.get(slot, 0) + 1

    def _let_go(self, client: Client) -> None:
        for slot in client.slots.values():
            self.carrier.read_by[slot] -= 1
        client.slots.clear()
        client.experts = []

    def _land_all(self) -> None:
        self.carrier.begun |= self.carrier.waiting
        self.carrier.waiting.clear()
        for slot in list(self.carrier.begun):
            self._end(slot, fails=False)

    def _end(self, slot: int, fails: bool) -> None:
        grant = self.carrier.begun.pop(slot)
        if not fails:
            self.carrier.contents[slot] = grant.layer * N_EXPERTS + grant.expert
            self.scheduler.landed(slot)
            return
        layer, expert, askers = self.scheduler.failed(slot)
        for number, section in askers:
            client = self.clients[number]
            if section == client.area.section and (client.layer, expert) == (layer, expert):
                self._let_go(client)  # it is told, and gives up
                client.area.leave()


def test_any_order_of_events():
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(max_examples=50, stateful_step_count=40, deadline=None),
    )


def anything(machine: SchedulerMachine, rng: random.Random) -> None:
    """One event; each sort about as often as it takes to keep all of them going."""
    number, layer = rng.randrange(MOST_CLIENTS), rng.randrange(N_LAYERS)
    experts = rng.sample(range(N_EXPERTS), N_EXPERTS)
    dice = rng.random()
    if dice < 0.30:
        machine.enters(number, layer, experts[:WAVE])
    elif dice < 0.50:
        machine.hints(number, layer, experts[: rng.randint(1, 3)], rng.randint(0, 2))
    elif dice < 0.70:
        machine.step()
    elif dice < 0.80:
        machine.drive_begins(rng.randint(1, 2))
    elif dice < 0.90 and machine.carrier.begun:
        machine.drive_ends(fails=rng.random() < 0.2)
    elif dice < 0.93:
        machine.drive_catches_up()
    elif dice < 0.96:
        machine.leaves(number)
    elif dice < 0.99:
        machine.time_passes(rng.choice([1.0, 25.0, HINT_AGE_MS]))
    else:
        machine.dies(number)
        machine.comes(number)


def test_random_walks():
    """Many more and longer ones, in which hints come to every verdict there is."""
    rng = random.Random(8)
    verdicts: Counter[str] = Counter()
    for _ in range(60):
        machine = SchedulerMachine()
        warm, full = rng.random() < 0.7, rng.random() < 0.7
        machine.start(extra=rng.randint(1, 3), warm=warm, full=full)
        for _ in range(0 if full else 2):  # it has been quiet
            machine.time_passes(1000.0)
            machine.drive_catches_up()
        for _ in range(200):
            anything(machine, rng)
            machine.everything_agrees()
        machine.teardown()
        verdicts.update(vars(machine.scheduler.prefetch.counters))
        verdicts["filled"] += machine.scheduler.backfill.slab_count
    kinds = ("expired", "demanded", "useful", "late", "wasted", "withdrawn", "failed", "filled")
    assert all(verdicts[kind] > 5 for kind in kinds), verdicts
