"""A daemon's host cache with clients that do anything at any time, also in the midst of its steps.

What is checked here is independent of how the cache does it: a slot that a client may read is never
written, a slot in the table holds its expert, who is told of a failed read or revoked had it
coming, and whoever waits is answered in the end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cache_bench import DEADLINE_MS, ROOM, BenchClient, CacheBench

from shared.errors import DaemonBusy, PlanError
from streamd.slot_cache.grants import NO_WISHES, Wishes
from streamd.slot_cache.stalls import stalled_clients


@dataclass(frozen=True)
class Setup:
    """Two size classes at the most. `room_for` clients fit, and `extra` slots of each class."""

    waves: tuple[int, ...]
    extra: tuple[int, ...]
    room_for: int
    layer_class: tuple[int, ...]  # -1: a dense layer
    n_experts: int


@dataclass(frozen=True)
class Whim:
    """What a client does: its next thing ("on"), or leave its section, or begin one ("again").

    If it begins a section now, it is about some `experts` of `layer`.
    """

    client: int
    kind: str
    layer: int
    experts: tuple[int, ...]


@dataclass
class Person:
    """A client and where it stands: idle, entered, send, wait or compute."""

    client: BenchClient
    at: str = "idle"
    layer: int = 0
    experts: tuple[int, ...] = ()
    missing: set[int] = field(default_factory=set)
    asked: bool = False  # the daemon has got the fetch of this section
    rung: bool = False
    reading: dict[int, int] = field(default_factory=dict)  # slot -> how often it was written

    @property
    def number(self) -> int:
        return self.client.number


class CacheWorld:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        class_count = max(setup.layer_class) + 1
        counts = [2 * setup.waves[c] * setup.room_for + setup.extra[c] for c in range(class_count)]
        self.bench = CacheBench(counts, setup.waves, setup.layer_class, setup.n_experts)
        self.bench.meanwhile = self._meanwhile
        self.cache = self.bench.cache
        self.people: list[Person] = []
        self.mail: list[tuple[Person, int, int, set[int]]] = []
        self.content: dict[int, tuple[int, int] | None] = {}  # slot -> (layer, expert)
        self.writes: dict[int, int] = {}  # slot -> how often
        self.moves: list[Sequence[Whim]] = []
        for _ in range(setup.room_for):
            self.attach()

    # Clients come, go and do what they like

    def attach(self) -> None:
        """One more client, unless the slots do not allow it."""
        taken = {person.number for person in self.people}
        number = next(n for n in range(len(taken) + 1) if n not in taken)
        fits = self._fit(len(taken) + 1)
        for slot in self.cache.ahead - set(self.bench.reads):
            self.cache.release(slot)
        try:
            client = self.bench.attach(number)
        except PlanError:
            assert not fits
        except DaemonBusy:
            assert fits
            assert self.bench.reads
        else:
            assert fits
            self.people.append(Person(client))

    def _fit(self, client_count: int) -> bool:
        return all(
            slots.count >= self.setup.layer_class.count(c) * self.setup.n_experts
            or slots.count >= 2 * self.setup.waves[c] * client_count
            for c, slots in enumerate(self.cache.classes)
        )

    def die(self, index: int) -> None:
        if self.people:
            self.cache.detach(self.people.pop(index % len(self.people)).number)

    def do(self, whim: Whim) -> None:
        if not self.people:
            return
        person = self.people[whim.client % len(self.people)]
        if whim.kind == "leave" or (whim.kind == "on" and person.at == "compute"):
            self._end_section(person)
            person.client.leave()
        elif whim.kind == "again" or person.at == "idle":
            self._end_section(person)
            self._enter(person, whim)
        elif person.at == "entered":
            self._look_up(person)
        elif person.at == "send":
            section = person.client.area.section
            self.mail.append((person, section, person.layer, set(person.missing)))
            person.at, person.rung = "wait", True
        else:
            self._look_again(person)

    def _enter(self, person: Person, whim: Whim) -> None:
        class_id = self.setup.layer_class[whim.layer]
        if class_id >= 0:
            person.layer, person.experts = whim.layer, whim.experts[: self.setup.waves[class_id]]
            person.at = "entered"
            person.client.enter()

    def _look_up(self, person: Person) -> None:
        slots = person.client.look_up(person.layer, person.experts)
        for expert, slot in zip(person.experts, slots, strict=True):
            self._see(person, expert, slot)
        person.at = "send" if person.missing else "compute"

    def _look_again(self, person: Person) -> None:
        for expert in list(person.missing):
            self._see(person, expert, int(self.bench.table.host_slots[person.layer, expert]))
        person.rung = False
        if not person.missing:
            person.at = "compute"

    def _see(self, person: Person, expert: int, slot: int) -> None:
        if slot < 0:
            person.missing.add(expert)
            return
        person.missing.discard(expert)
        assert self.content[slot] == (person.layer, expert), f"slot {slot} holds another expert"
        person.reading[slot] = self.writes[slot]

    def _end_section(self, person: Person) -> None:
        """What was read is used now: it must not have been written meanwhile."""
        for slot, writes in person.reading.items():
            assert self.writes[slot] == writes, f"slot {slot} was torn"
        person.reading.clear()
        person.missing.clear()
        person.at, person.asked = "idle", False

    # The daemon

    def step(
        self,
        room_count: int = ROOM,
        moves: Iterable[Sequence[Whim]] = (),
        wishes: Wishes = NO_WISHES,
    ) -> None:
        """The daemon's step; wherever others may act during it the next of `moves` happens."""
        self._deliver()
        self.moves = list(moves)
        step = self.bench.step(room_count, wishes)
        self.moves = []
        assert len(step.grants) <= room_count
        assert self.cache.ahead.isdisjoint(step.joined)
        for grant in step.grants:
            for person in self.people:
                assert grant.slot not in person.reading, f"client {person.number} still reads it"
            self.content[grant.slot] = None
            self.writes[grant.slot] = self.writes.get(grant.slot, 0) + 1
        self._ring(step.ring)

    def _deliver(self) -> None:
        for person, section, layer, experts in self.mail:
            if person in self.people:
                self.cache.fetch(person.number, section, layer, experts)
                person.asked |= person.client.area.section == section
        self.mail.clear()

    def _meanwhile(self) -> None:
        for whim in self.moves.pop(0) if self.moves else ():
            self.do(whim)

    def finish(self, slot: int) -> None:
        grant = self.bench.reads[slot]
        self.content[slot] = (grant.layer, grant.expert)
        self._ring(self.bench.finish(slot))
        slots = self.cache.class_of_slot(slot)
        if self.cache.reserve.room_ahead(slots, self.cache.ahead) < 0:
            self.cache.release(slot)

    def stop_holding(self, index: int) -> None:
        """A slab that was brought for nobody in particular may go again."""
        held = sorted(self.cache.ahead - set(self.bench.reads))
        if held:
            self.cache.release(held[index % len(held)])

    def finish_all(self) -> None:
        for slot in list(self.bench.reads):
            self.finish(slot)

    def fail(self, slot: int) -> None:
        grant = self.bench.reads[slot]
        layer, expert, told = self.bench.fail(slot)
        assert (layer, expert) == (grant.layer, grant.expert)
        for person in self.people:
            # One that has left its section already does not listen.
            if person.at != "idle" and (person.number, person.client.area.section) in told:
                assert (person.layer, person.at) == (layer, "wait")
                assert expert in person.experts
                self._end_section(person)
                person.client.leave()

    def pass_time(self, elapsed_ms: float) -> None:
        """The clock moves on, and who is stalled is revoked: it throws its result away."""
        self.bench.now_ms += elapsed_ms
        self.step(room_count=0)
        for number in stalled_clients(self.cache, self.bench.now_ms, DEADLINE_MS):
            person = next(person for person in self.people if person.number == number)
            assert person.at != "idle"
            assert not self._waits_for_us(person)
            assert any(self._waits_for_us(other) for other in self.people if other is not person)
            self.cache.revoke(number)
            assert self.bench.table.revoked[number] == 1
            self.people.remove(person)

    def _waits_for_us(self, person: Person) -> bool:
        row = self.bench.table.host_slots[person.layer]
        return person.at == "wait" and person.asked and any(row[e] < 0 for e in person.missing)

    def _ring(self, numbers: Iterable[int]) -> None:
        for person in self.people:
            person.rung |= person.number in numbers

    def drain(self) -> None:
        """Every section ends and every read succeeds: then nobody may go on waiting.

        What is held for nobody stays held: no section needs those slots.
        """
        for _ in range(8 * (len(self.people) + 1)):  # more than a chain of waiting clients needs
            for person in self.people:
                if person.at == "wait" and person.rung:
                    self._look_again(person)
                if person.at not in ("wait", "idle"):
                    self._end_section(person)
                    person.client.leave()
            self.step()
            self.finish_all()
        assert [person.number for person in self.people if person.at == "wait"] == []
        assert not self.cache.waiting
