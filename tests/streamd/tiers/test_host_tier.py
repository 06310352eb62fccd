"""Grants become slabs in slots, also where memory or the drive fails."""

import errno
import select
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

from shared.arena import ArenaLayout
from shared.errors import ReadFailed
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from streamd.readers.direct import open_file
from streamd.readers.pread_engine import PreadEngine
from streamd.readers.reader import Reader
from streamd.readers.slab_read import Priority
from streamd.slot_cache.grants import Grant
from streamd.tiers.checksums import SlabChecksums
from streamd.tiers.host_tier import HostTier

DEPTH = 8
SLOTS = 6
PATIENCE_S = 10.0


class LyingEngine(PreadEngine):
    """While `lying`, one bit of whatever is read comes wrong, and no error tells of it."""

    lying = False

    def __init__(self):
        super().__init__(DEPTH)
        self.buffers: dict[int, memoryview] = {}

    def submit(self, token: int, fd: int, buffer: memoryview, offset: int) -> None:
        self.buffers[token] = buffer
        super().submit(token, fd, buffer, offset)

    def reap(self) -> list[tuple[int, int]]:
        ended = super().reap()
        for token, _ in ended:
            buffer = self.buffers.pop(token)
            if self.lying:
                buffer[len(buffer) // 2] ^= 1
        return ended


class World:
    """A tier of a few slots for the first size class of the demo model."""

    def __init__(self, model, stack: ExitStack, **options):
        index = GgufIndex.open(model)
        self.experts = ExpertIndex.from_gguf(index)
        self.layer = self.experts.classes[0].layers[0]
        file = open_file(model)
        stack.callback(file.close)
        self.engine = LyingEngine()
        self.reader = Reader(self.engine, [file], DEPTH)
        stack.callback(self.reader.close)
        parts = self.experts.classes[0].part_bytes
        layout = ArenaLayout((parts,), (SLOTS,), file.align_bytes)
        self.tier = HostTier(layout, self.experts, self.reader, **options)
        stack.callback(self.tier.close)
        self.content = model.read_bytes()

    def arrive(self, count: int) -> dict[int, ReadFailed | None]:
        """By slot, what is wrong with each of the next `count` slabs."""
        bell = select.poll()
        bell.register(self.reader.fileno(), select.POLLIN)
        bell.register(self.tier.fileno(), select.POLLIN)
        done, deadline_s = {}, time.monotonic() + PATIENCE_S
        while len(done) < count:
            assert time.monotonic() < deadline_s
            bell.poll(1000)
            for completion in self.tier.poll():
                assert completion.key not in done
                done[completion.key] = self.tier.arrived(completion.key, completion.error)
        return done

    def check(self, slot: int, expert: int) -> None:
        stretches = self.tier.layout.stretches()[slot]
        for extent, (offset, _) in zip(
            self.experts.extents(self.layer, expert), stretches.tolist(), strict=True
        ):
            begin = offset + extent.offset % self.tier.layout.align
            landed = self.tier.region.memory[begin : begin + extent.length]
            assert landed == self.content[extent.offset : extent.offset + extent.length]


@pytest.fixture
def make_world(demo_model):
    with ExitStack() as stack:
        yield lambda **options: World(demo_model, stack, **options)


def test_slabs_land_in_their_slots_the_first_time_and_again(make_world):
    world = make_world()
    rng = np.random.default_rng(1)
    for _ in range(3):
        experts = rng.choice(world.experts.n_experts, SLOTS, replace=False).tolist()
        room = world.tier.room
        for slot, expert in enumerate(experts):
            world.tier.submit(Grant(slot, world.layer, expert))
        assert world.tier.room == room - SLOTS
        assert world.arrive(SLOTS) == dict.fromkeys(range(SLOTS))
        assert world.tier.room == room
        for slot, expert in enumerate(experts):
            world.check(slot, expert)


def test_a_slot_without_pages_holds_up_no_other(make_world):
    go_on = threading.Event()

    def find(buffer: memoryview) -> None:
        if find.calls:
            assert go_on.wait(PATIENCE_S)
        find.calls += 1

    find.calls = 0
    world = make_world(find_pages=find)
    world.tier.submit(Grant(0, world.layer, 0))
    assert world.arrive(1) == {0: None}
    world.tier.submit(Grant(1, world.layer, 1))  # the kernel takes its time for this one
    for expert in range(2, 5):
        world.tier.submit(Grant(0, world.layer, expert))
        assert world.arrive(1) == {0: None}
        world.check(0, expert)
    go_on.set()
    assert world.arrive(1) == {1: None}
    world.check(1, 1)


def test_a_slot_that_gets_no_memory_fails_its_slab_and_may_be_tried_again(make_world):
    def find(buffer: memoryview) -> None:
        find.calls += 1
        if find.calls == 1:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    find.calls = 0
    world = make_world(find_pages=find)
    world.tier.submit(Grant(3, world.layer, 7))
    error = world.arrive(1)[3]
    assert isinstance(error, ReadFailed)
    assert "Cannot allocate memory" in error.message
    assert "--host-cache" in error.remedy
    world.tier.submit(Grant(3, world.layer, 7))
    assert world.arrive(1) == {3: None}
    world.check(3, 7)


def test_a_flipped_bit_of_a_second_reading_is_caught(make_world):
    checksums = SlabChecksums(7, 16)
    world = make_world(checksums=checksums)
    for slot in range(2):
        world.tier.submit(Grant(slot, world.layer, 5))
        assert world.arrive(1) == {slot: None}
    assert checksums.checked_count == 1
    world.engine.lying = True
    world.tier.submit(Grant(2, world.layer, 5))
    error = world.arrive(1)[2]
    assert isinstance(error, ReadFailed)
    assert f"expert 5 of layer {world.layer}" in error.message
    world.engine.lying = False
    world.tier.submit(Grant(2, world.layer, 5))
    assert world.arrive(1) == {2: None}


def test_without_verify_nobody_notices(make_world):
    world = make_world()
    world.engine.lying = True
    world.tier.submit(Grant(0, world.layer, 5))
    assert world.arrive(1) == {0: None}
    with pytest.raises(AssertionError):
        world.check(0, 5)


def ahead(world, slot, expert):
    return Grant(slot, world.layer, expert, Priority.PREFETCH)


def test_what_the_disk_has_not_begun_can_be_withdrawn(make_world):
    world = make_world()
    for slot in range(2):
        world.tier.submit(Grant(slot, world.layer, slot))
    assert world.arrive(2) == {0: None, 1: None}
    room = world.tier.room
    world.tier.submit(Grant(0, world.layer, 3))
    world.reader.depth = 0  # nothing is begun any more
    world.tier.submit(ahead(world, 1, 4))
    assert world.tier.withdraw(1) is True
    assert world.tier.withdraw(0) is False
    world.reader.depth = DEPTH
    assert world.arrive(1) == {0: None}
    assert world.tier.room == room
    world.tier.submit(Grant(1, world.layer, 4))
    assert world.arrive(1) == {1: None}
    world.check(1, 4)


@pytest.fixture
def slow_pages(make_world):
    """A world in which nobody has pages before `go_on` is set; fault: of all that are asked for."""
    go_on = threading.Event()

    def find(buffer: memoryview) -> None:
        assert go_on.wait(PATIENCE_S)
        if world.fault:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    world = make_world(find_pages=find)
    world.go_on, world.fault = go_on, False
    yield world
    go_on.set()


def test_what_waits_for_pages_can_be_withdrawn(slow_pages):
    """It is never read; its slot has pages then like any other."""
    world = slow_pages
    room = world.tier.room
    for slot in range(2):
        world.tier.submit(ahead(world, slot, slot))
    assert world.tier.withdraw(1) is True
    world.go_on.set()
    assert world.arrive(1) == {0: None}
    deadline_s = time.monotonic() + PATIENCE_S
    while not world.tier.has_pages(1):
        assert world.tier.poll() == []
        assert time.monotonic() < deadline_s
    assert world.tier.room == room
    assert world.engine.buffers == {}, "nothing is being read"
    world.tier.submit(Grant(1, world.layer, 5))
    assert world.arrive(1) == {1: None}
    world.check(1, 5)


def test_a_slot_that_is_given_anew_while_it_waits_for_pages_holds_the_new_expert(slow_pages):
    world = slow_pages
    world.tier.submit(ahead(world, 0, 3))
    assert world.tier.withdraw(0) is True
    world.tier.submit(Grant(0, world.layer, 9))
    world.go_on.set()
    assert world.arrive(1) == {0: None}
    world.check(0, 9)
    assert world.tier.poll() == []


def test_nobody_hears_of_pages_that_what_was_withdrawn_did_not_get(slow_pages):
    world = slow_pages
    world.fault = True
    for slot in range(2):
        world.tier.submit(ahead(world, slot, slot))
    world.tier.withdraw(0)
    world.go_on.set()
    assert list(world.arrive(1)) == [1]
    world.fault = False
    world.tier.submit(Grant(0, world.layer, 4))
    assert world.arrive(1) == {0: None}
    world.check(0, 4)


def test_a_slot_that_waits_for_pages_can_be_promoted(make_world):
    go_on = threading.Event()
    world = make_world(find_pages=lambda buffer: go_on.wait(PATIENCE_S))
    priorities = []
    submit = world.reader.submit
    world.reader.submit = lambda read, priority: priorities.append(priority) or submit(read)
    for slot in range(2):
        world.tier.submit(ahead(world, slot, slot))
    world.tier.promote(1, owner=0)
    go_on.set()
    assert world.arrive(2) == {0: None, 1: None}
    assert priorities == [Priority.PREFETCH, Priority.DEMAND]


def test_what_is_read_ahead_can_be_promoted(make_world):
    world = make_world()
    world.tier.submit(Grant(0, world.layer, 0))
    assert world.arrive(1) == {0: None}
    world.reader.depth = 0
    world.tier.submit(ahead(world, 0, 1))
    world.reader.depth = DEPTH
    world.tier.promote(0, owner=0)
    assert world.arrive(1) == {0: None}
    world.check(0, 1)
