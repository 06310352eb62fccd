"""The reader against a list of what it owes: random slabs, priorities, cancels and faults.

Every target is checked against the file when its slab completes, then painted over; paint that
changes later, or beside a target, is a read that strayed. What a rule does depends on what the disk
has done by then, so no rule has a precondition on that.
"""

import errno
import random
import time
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from shared.errors import ReadFailed
from streamd.readers.direct import open_file
from streamd.readers.engine import address_of
from streamd.readers.slab_read import Extent, Priority, SlabRead

PAGE = 4096
PAINT = 0xA5
SMALL, LARGE = 24 << 10, 160 << 10  # bytes of a place; the last page of each is never a target
SMALL_COUNT, LARGE_COUNT = 40, 8
READS_MAX = 6000
EXTENTS_WANTED = 4_000  # of each engine
PATIENCE_S = 10.0
SEEDS = st.integers(0, 2**32)


class Place:
    """A stretch of the arena: a target and the paint behind it."""

    def __init__(self, arena: memoryview) -> None:
        self.all = arena
        self.target = arena[:-PAGE]
        self.painted = bytes([PAINT]) * len(arena)
        self.paint()

    def paint(self) -> None:
        self.all[:] = self.painted

    def is_painted(self, begin: int = 0) -> bool:
        return bytes(self.all[begin:]) == self.painted[begin:]


def faults_from(seed: int, fatal: bool) -> dict[int, int]:
    rng = random.Random(seed)
    passing = [-errno.EAGAIN, -errno.EINTR, 0, 1, 511, 512, PAGE, 3 * PAGE, 5000]
    share = rng.choice([0.0, 0.05, 0.3])
    faults = {n: rng.choice(passing) for n in range(READS_MAX) if rng.random() < share}
    if fatal:
        faults |= {n: -errno.EIO for n in range(READS_MAX) if rng.random() < 0.03}
    return faults


class ReaderMachine(RuleBasedStateMachine):
    """`bench`, `file` and `content` are given by the test below; `totals` outlives an example."""

    bench = file = content = None
    totals: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.owed: dict[int, list[tuple[Extent, Place]]] = {}
        self.cancelled: set[int] = set()
        self.next_key = 0
        self.started = False

    @initialize(seed=SEEDS, fatal=st.booleans())
    def start(self, seed: int, fatal: bool) -> None:
        self.started, self.fatal = True, fatal
        faults = faults_from(seed, fatal)
        self.b = self.bench(self.file, faults=faults, shuffle=random.Random(seed))
        arena, at = memoryview(self.b.arena), 0
        at = -address_of(arena) % self.b.reader.align_bytes
        self.free: dict[int, list[Place]] = {SMALL: [], LARGE: []}
        for size, count in ((SMALL, SMALL_COUNT), (LARGE, LARGE_COUNT)):
            for _ in range(count):
                self.free[size].append(Place(arena[at : at + size]))
                at += size
        arena.release()

    @rule(seed=SEEDS, rounds=st.integers(1, 12))
    def submit_and_poll(self, seed: int, rounds: int) -> None:
        rng = random.Random(seed)
        for _ in range(rounds):
            self._submit(rng)
            for _ in range(rng.randint(0, 12)):
                self._settle(self.b.poll(0.0))

    @rule(seed=SEEDS)
    def submit(self, seed: int) -> None:
        self._submit(random.Random(seed))

    def _submit(self, rng: random.Random) -> None:
        """A few slabs of a few extents, as far as there are places."""
        for _ in range(rng.randint(1, 4)):
            parts = [self._extent(rng) for _ in range(rng.randint(1, 4))]
            parts = [part for part in parts if part is not None]
            if not any(extent.length for extent, _ in parts):
                self._give_back(parts)
                continue
            self.owed[self.next_key] = parts
            extents = tuple(extent for extent, _ in parts)
            slab = SlabRead(self.next_key, extents)
            self.b.reader.submit(slab, rng.choice(list(Priority)))
            self.next_key += 1
            self.totals["extents"] += len(parts)

    def _extent(self, rng: random.Random) -> tuple[Extent, Place] | None:
        size = LARGE if rng.random() < 0.15 and self.free[LARGE] else SMALL
        if not self.free[size]:
            return None
        place = self.free[size].pop()
        end = len(self.content)
        most = len(place.target) - self.b.reader.align_bytes
        length = rng.choice([0, 1, rng.randint(0, most), rng.randint(0, PAGE), most])
        at_end = rng.random() < 0.2
        offset = end - length if at_end else rng.randint(0, end - length)
        return Extent(0, offset, length, place.target), place

    @rule(count=st.integers(1, 8))
    def poll(self, count: int) -> None:
        for _ in range(count):
            self._settle(self.b.poll(0.001))

    @rule(ahead=st.integers(0, 6))
    def hold(self, ahead: int) -> None:
        """A read to come will dawdle until it is let go."""
        self.b.engine.held.add(len(self.b.engine.seen) + ahead)

    @rule()
    def let_go(self) -> None:
        self.b.engine.release()

    @rule(seed=SEEDS)
    def promote(self, seed: int) -> None:
        if self.owed:
            self.b.reader.promote(random.Random(seed).choice(list(self.owed)))

    @rule(seed=SEEDS)
    def cancel(self, seed: int) -> None:
        if not self.owed:
            return
        key = random.Random(seed).choice(list(self.owed))
        if self.b.reader.cancel(key):
            self._give_back(self.owed.pop(key))
            self.totals["forgotten"] += 1
        else:
            self.cancelled.add(key)

    @invariant()
    def free_places_are_as_they_were_painted(self) -> None:
        if self.started:
            for places in self.free.values():
                assert all(place.is_painted() for place in places)

    @invariant()
    def the_reader_counts_right(self) -> None:
        if self.started:
            stats = self.b.reader.stats()
            assert stats.in_flight_reads <= self.b.depth
            assert (stats.in_flight_bytes > 0) == (stats.in_flight_reads > 0)
            assert self.b.reader.room == 4096 - len(self.owed)

    def teardown(self) -> None:
        if not self.started:
            return
        deadline_s = time.monotonic() + PATIENCE_S
        while self.owed:
            assert time.monotonic() < deadline_s, f"{sorted(self.owed)} never completed"
            self.b.engine.release()
            self._settle(self.b.poll(0.05))
        assert self.b.poll(0.001) == []
        self.free_places_are_as_they_were_painted()
        assert len(self.free[SMALL]) == SMALL_COUNT
        assert len(self.free[LARGE]) == LARGE_COUNT
        self.totals["faults"] += self.b.engine.fault_count
        assert self.b.reader.close()
        for places in self.free.values():
            for place in places:
                place.target.release()
                place.all.release()
        self.b.__exit__()

    def _settle(self, completions) -> None:
        for completion in completions:
            parts = self.owed.pop(completion.key)  # KeyError: completed twice, or never asked for
            if completion.error is None:
                for extent, place in parts:
                    self._check(extent, place)
            else:
                self.totals["failed"] += 1
                assert isinstance(completion.error, ReadFailed)
                assert self.fatal or completion.key in self.cancelled
            self._give_back(parts)

    def _check(self, extent: Extent, place: Place) -> None:
        align = self.b.reader.align_bytes
        delta = extent.offset % align
        landed = bytes(place.target[delta : delta + extent.length])
        assert landed == self.content[extent.offset : extent.offset + extent.length]
        widened = -(-(delta + extent.length) // align) * align if extent.length else 0
        assert place.is_painted(widened)

    def _give_back(self, parts: list[tuple[Extent, Place]]) -> None:
        for _, place in parts:
            place.paint()
            self.free[len(place.all)].append(place)


@pytest.mark.timeout(240)
def test_any_story_of_slabs_and_faults_ends_well(engine_name, bench, model_path, content):
    file = open_file(model_path)
    totals = {"extents": 0, "failed": 0, "forgotten": 0, "faults": 0}

    class Machine(ReaderMachine):
        pass

    Machine.bench, Machine.file = staticmethod(bench), file
    Machine.content, Machine.totals = content, totals
    # Until each kind of end has been seen too: by chance a round may have no fatal fault.
    while totals["extents"] < EXTENTS_WANTED or min(totals.values()) == 0:
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=25,
                stateful_step_count=50,
                deadline=None,
                database=None,
                phases=[Phase.generate],  # a disk does not repeat itself, so there is no shrinking
                suppress_health_check=list(HealthCheck),
            ),
        )
    file.close()
    assert min(totals.values()) > 0, totals
