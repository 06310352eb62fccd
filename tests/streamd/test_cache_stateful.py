"""The host cache under clients that do anything at any time, also in the midst of its steps.

What is checked is independent of how the cache does it: a slot that a client may read is never
written, a slot in the table holds its expert, and whoever waits is answered in the end.
"""

from dataclasses import dataclass, field

from cache_bench import BenchClient, CacheBench
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
from streamd.cache_integrity import check_integrity

MAX_CLIENTS = 3
N_EXPERTS = 6
LAYERS = 3
# More rounds than any chain of clients that wait for each other is long.
DRAIN_ROUNDS = 8 * MAX_CLIENTS


@dataclass
class Person:
    """A client and what it is about to do: idle, entered, send, wait or compute."""

    client: BenchClient
    at: str = "idle"
    layer: int = 0
    experts: frozenset[int] = frozenset()
    missing: set[int] = field(default_factory=set)
    asked: bool = False  # the daemon has got the fetch of this section
    rung: bool = False
    reading: dict[int, int] = field(default_factory=dict)  # slot -> how often it was written

    @property
    def number(self) -> int:
        return self.client.number


choices = st.frozensets(st.integers(0, N_EXPERTS - 1), min_size=1, max_size=3)
whims = st.tuples(
    st.integers(0, MAX_CLIENTS - 1),
    st.sampled_from(["on"] * 8 + ["leave", "again"]),
    st.integers(0, LAYERS - 1),
    choices,
)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        waves=st.tuples(st.integers(1, 2), st.integers(1, 3)),
        extra=st.tuples(st.integers(0, 2), st.integers(0, 2)),
        room_for=st.integers(1, MAX_CLIENTS),
        layer_class=st.sampled_from([(0, 0, 0), (0, 1, 1), (0, -1, 1)]),
    )
    def start(self, waves, extra, room_for, layer_class):
        class_count = max(layer_class) + 1
        counts = [2 * waves[c] * room_for + extra[c] for c in range(class_count)]
        self.waves, self.layer_class = waves, layer_class
        self.bench = CacheBench(counts, waves, layer_class, N_EXPERTS)
        self.bench.at_barrier = self.meanwhile
        self.cache = self.bench.cache
        self.people: list[Person] = []
        self.mail: list[tuple[Person, int, int, frozenset[int]]] = []
        self.content: dict[int, tuple[int, int] | None] = {}  # slot -> (layer, expert)
        self.writes: dict[int, int] = {}  # slot -> how often
        self.moves: list[list[tuple]] = []
        for _ in range(room_for):
            self.attach()

    # The clients

    def whim(self, index, kind, layer, experts):
        """One client does its next thing, or leaves its section, or begins another at once."""
        if not self.people:
            return
        person = self.people[index % len(self.people)]
        if self.layer_class[layer] < 0:
            layer = 0
        if kind == "leave" or (kind == "on" and person.at == "compute"):
            self.end_section(person)
            person.client.leave()
        elif kind == "again" or person.at == "idle":
            self.end_section(person)
            wave = self.waves[self.layer_class[layer]]
            person.layer, person.experts = layer, frozenset(sorted(experts)[:wave])
            person.at = "entered"
            person.client.enter()
        elif person.at == "entered":
            self.look_up(person)
        elif person.at == "send":
            fetch = frozenset(person.missing)
            self.mail.append((person, person.client.area.section, person.layer, fetch))
            person.at, person.rung = "wait", True
        elif person.at == "wait":
            self.look_again(person)

    def end_section(self, person):
        """What was read is used now: it must not have been written meanwhile."""
        for slot, writes in person.reading.items():
            assert self.writes[slot] == writes, f"slot {slot} was torn"
        person.reading.clear()
        person.missing.clear()
        person.at, person.asked = "idle", False

    def look_up(self, person):
        experts = sorted(person.experts)
        slots = person.client.look_up(person.layer, experts)
        for expert, slot in zip(experts, slots, strict=True):
            self.see(person, expert, slot)
        person.at = "send" if person.missing else "compute"

    def look_again(self, person):
        for expert in list(person.missing):
            self.see(person, expert, int(self.bench.table.host_slots[person.layer, expert]))
        person.rung = False
        if not person.missing:
            person.at = "compute"

    def see(self, person, expert, slot):
        if slot < 0:
            person.missing.add(expert)
            return
        person.missing.discard(expert)
        assert self.content[slot] == (person.layer, expert), f"slot {slot} holds another expert"
        person.reading[slot] = self.writes[slot]

    def waits_for_the_daemon(self, person):
        row = self.bench.table.host_slots[person.layer]
        return person.at == "wait" and person.asked and any(row[e] < 0 for e in person.missing)

    # The daemon

    def deliver(self):
        for person, section, layer, experts in self.mail:
            if person in self.people:
                self.cache.fetch(person.number, section, layer, experts)
                person.asked |= person.client.area.section == section
        self.mail.clear()

    def meanwhile(self):
        for move in self.moves.pop(0) if self.moves else []:
            self.whim(*move)

    def daemon_step(self, room_count, moves):
        self.deliver()
        self.moves = list(moves)
        step = self.bench.step(room_count)
        self.moves = []
        assert len(step.grants) <= room_count
        for grant in step.grants:
            for person in self.people:
                assert grant.slot not in person.reading, f"client {person.number} still reads it"
            self.content[grant.slot] = None
            self.writes[grant.slot] = self.writes.get(grant.slot, 0) + 1
        self.ring(step.ring)

    def finish(self, slot):
        grant = self.bench.reads[slot]
        self.content[slot] = (grant.layer, grant.expert)
        self.ring(self.bench.finish(slot))

    def ring(self, numbers):
        for person in self.people:
            person.rung |= person.number in numbers

    # Rules

    @rule()
    def attach(self):
        taken = {person.number for person in self.people}
        number = next(n for n in range(len(taken) + 1) if n not in taken)
        try:
            client = self.bench.attach(number)
        except PlanError:
            assert self.attached_beyond_the_slots(len(taken) + 1)
        except DaemonBusy:
            assert self.bench.reads
            assert not self.attached_beyond_the_slots(len(taken) + 1)
        else:
            assert not self.attached_beyond_the_slots(len(taken) + 1)
            self.people.append(Person(client))

    def attached_beyond_the_slots(self, client_count):
        return any(
            slots.count < min(slots_of_all, 2 * wave * client_count)
            for slots, wave, slots_of_all in zip(
                self.cache.classes,
                self.waves,
                [self.layer_class.count(c) * N_EXPERTS for c in (0, 1)],
                strict=False,
            )
        )

    @rule(moves=st.lists(whims, min_size=1, max_size=8))
    def clients_move(self, moves):
        for move in moves:
            self.whim(*move)

    @rule(index=st.integers(0, MAX_CLIENTS - 1), layer=st.integers(0, LAYERS - 1), chosen=choices)
    def client_works(self, index, layer, chosen):
        """A section from beginning to end, unless it has to wait for another client."""
        for _ in range(6):
            self.whim(index, "on", layer, chosen)
            self.daemon_step(100, [])
            for slot in list(self.bench.reads):
                self.finish(slot)

    @rule(
        room_count=st.sampled_from([0, 1, 100, 100]),
        moves=st.lists(st.lists(whims, max_size=4), max_size=3),
    )
    def step(self, room_count, moves):
        self.daemon_step(room_count, moves)

    @precondition(lambda self: self.bench.reads)
    @rule(picks=st.lists(st.integers(0, 100), min_size=1, max_size=4))
    def reads_succeed(self, picks):
        for pick in picks[: len(self.bench.reads)]:
            self.finish(sorted(self.bench.reads)[pick % len(self.bench.reads)])

    @precondition(lambda self: self.bench.reads)
    @rule(pick=st.integers(0, 100))
    def read_fails(self, pick):
        slot = sorted(self.bench.reads)[pick % len(self.bench.reads)]
        grant = self.bench.reads[slot]
        layer, expert, told = self.bench.fail(slot)
        assert (layer, expert) == (grant.layer, grant.expert)
        for person in self.people:
            # One that has left its section already does not listen.
            if person.at != "idle" and (person.number, person.client.area.section) in told:
                assert (person.layer, person.at) == (layer, "wait")
                assert expert in person.missing
                self.end_section(person)
                person.client.leave()

    @precondition(lambda self: self.people)
    @rule(pick=st.integers(0, 100))
    def client_dies(self, pick):
        person = self.people.pop(pick % len(self.people))
        self.cache.detach(person.number)

    @rule(elapsed_ms=st.integers(1, 1500))
    def stalled_clients_are_revoked(self, elapsed_ms):
        self.bench.now_ms += elapsed_ms
        for number in self.cache.stalled_clients(2000):
            person = next(person for person in self.people if person.number == number)
            assert person.at != "idle"
            assert not self.waits_for_the_daemon(person), "it is we who let it wait"
            assert any(self.waits_for_the_daemon(p) for p in self.people if p is not person)
            self.cache.revoke(number)
            assert self.bench.table.revoked[number] == 1
            self.people.remove(person)  # it throws its result away

    @invariant()
    def all_is_consistent(self):
        if hasattr(self, "cache"):
            check_integrity(self.cache)

    def teardown(self):
        """Every section ends and every read succeeds: then nobody may go on waiting."""
        if not hasattr(self, "cache"):
            return
        for _ in range(DRAIN_ROUNDS):
            for person in self.people:
                if person.at == "wait" and person.rung:
                    self.look_again(person)
                if person.at not in ("wait", "idle"):
                    self.end_section(person)
                    person.client.leave()
            self.daemon_step(100, [])
            for slot in list(self.bench.reads):
                self.finish(slot)
        assert [p.number for p in self.people if p.at == "wait"] == []
        assert not self.cache.waiting


def test_clients_and_daemon():
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(max_examples=150, stateful_step_count=40, deadline=None),
    )
