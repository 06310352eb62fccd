"""Pages given back and had again, by regions, readers and the tier as a whole."""

import os
import select
import time
from contextlib import ExitStack

import pytest
from cache_bench import CacheBench

from shared import shm
from shared.arena import ArenaLayout
from shared.errors import ConfigError, GpuError
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from streamd.planning.plan import HostPlan
from streamd.readers.direct import open_file
from streamd.readers.probe import AUTO, choose_engine
from streamd.readers.reader import Reader
from streamd.slot_cache.grants import Grant
from streamd.tiers.governor import CALM_S
from streamd.tiers.host_governor import INTERVAL_S, MAX_GIVEN_BACK, HostGovernor
from streamd.tiers.host_tier import HostTier
from streamd.tiers.regions import Region

MIB = 1 << 20
SLOTS = 40
PAGE = 4096


def in_memory(region) -> int:
    return os.fstat(region.fd).st_blocks * 512


def test_pages_of_a_returnable_region_are_given_back():
    region = Region("test", 8 * MIB, returnable=True)
    memory = memoryview(region.memory)
    memory[:] = b"x" * len(memory)
    before_bytes = in_memory(region)
    region.give_back(memory[MIB + 5 : 3 * MIB + 5])
    assert before_bytes - in_memory(region) == 2 * MIB - PAGE
    assert memory[MIB + 5 : MIB + PAGE] == b"x" * (PAGE - 5), "whole pages only"
    assert memory[2 * MIB : 2 * MIB + 9] == bytes(9)
    region.give_back(memory[5:20])
    assert memory[5:20] == b"x" * 15
    memory.release()
    region.close()


def test_others_cannot_write_a_returnable_region():
    region = Region("test", MIB, returnable=True)
    region.memory[:5] = b"bytes"
    with shm.map_readonly(region.fd, region.size_bytes) as seen:
        assert seen[:5] == b"bytes"
    with pytest.raises(ConfigError):
        shm.map_writable(region.fd, region.size_bytes)
    assert os.fstat(region.fd).st_mode & 0o777 == 0o400
    with pytest.raises(OSError, match="Invalid argument"):
        os.ftruncate(region.fd, 4096)
    region.close()


@pytest.fixture
def tier(demo_model):
    """Slots of the demo's first size class, read by whatever engine works here."""
    with ExitStack() as stack:
        index = GgufIndex.open(demo_model)
        experts = ExpertIndex.from_gguf(index)
        file = open_file(demo_model)
        stack.callback(file.close)
        engine, _ = choose_engine(AUTO, 8)
        reader = Reader(engine, [file], 8)
        stack.callback(reader.close)
        layout = ArenaLayout((experts.classes[0].part_bytes,), (SLOTS,), file.align_bytes)
        tier = HostTier(layout, experts, reader, returnable=True)
        stack.callback(tier.close)
        tier.experts, tier.reader = experts, reader
        tier.content = demo_model.read_bytes()
        yield tier


def fill(tier, slots, first_expert=0):
    """Read an expert into each of `slots`, and see that it is there."""
    layer = tier.experts.classes[0].layers[0]
    grants = [Grant(s, layer, (s + first_expert) % tier.experts.n_experts) for s in slots]
    for grant in grants:
        tier.submit(grant)
    bell = select.poll()
    for fd in (tier.reader.fileno(), tier.fileno()):
        bell.register(fd, select.POLLIN)
    left_count, deadline_s = len(grants), time.monotonic() + 20
    while left_count:
        assert time.monotonic() < deadline_s
        bell.poll(1000)
        for completion in tier.poll():
            assert tier.arrived(completion.key, completion.error) is None
            left_count -= 1
    for grant in grants:
        for extent, (offset, _) in zip(
            tier.experts.extents(layer, grant.expert),
            tier.layout.stretches()[grant.slot].tolist(),
            strict=True,
        ):
            begin = offset + extent.offset % tier.layout.align
            landed = tier.region.memory[begin : begin + extent.length]
            assert landed == tier.content[extent.offset : extent.offset + extent.length]


def test_a_slot_is_given_back_and_read_into_again(tier):
    fill(tier, range(8))
    held_bytes, before_bytes = tier.held_bytes, in_memory(tier.region)
    for slot in (2, 3, 4):
        tier.give_back(slot)
    assert tier.held_bytes == held_bytes * 5 // 8
    slot_bytes = held_bytes // 8
    assert before_bytes - in_memory(tier.region) > 3 * (slot_bytes - 2 * PAGE)
    fill(tier, range(8), first_expert=3)
    assert (tier.held_bytes, in_memory(tier.region)) == (held_bytes, before_bytes)


def test_a_slot_that_was_never_used_has_nothing_to_give(tier):
    tier.give_back(0)
    assert tier.held_bytes == 0


def test_a_machine_that_is_short_gets_memory_and_gives_it_again(tier):
    cache = CacheBench((SLOTS,), (4,), (0, 0, 0, 0), 16).cache
    (slots,) = cache.classes
    total_bytes = tier.layout.total_bytes
    fill(tier, range(SLOTS))
    initial_bytes = 32 * total_bytes  # it is short below one, and well with two of them
    plan = HostPlan(tier.layout, (4,), total_bytes, total_bytes // 4, total_bytes, 0, initial_bytes)
    machine = {"available": initial_bytes, "now_s": 0.0}
    unpinned = []
    governor = HostGovernor(
        plan, cache, tier, unpinned.append,
        lambda: machine["available"], lambda: machine["now_s"],
    )  # fmt: skip

    def tick(available, seconds=INTERVAL_S):
        machine["available"] = available
        machine["now_s"] += seconds
        governor.tick()

    tick(initial_bytes)
    assert (slots.usable_count, unpinned) == (SLOTS, [])
    tick(total_bytes // 2, seconds=INTERVAL_S / 2)
    assert slots.usable_count == SLOTS, "not so often"
    tick(total_bytes // 2)
    assert slots.usable_count == SLOTS // 4, "the floor"
    held_bytes, turns = [tier.held_bytes], 0
    while governor.busy:
        governor.tick()
        held_bytes.append(tier.held_bytes)
        turns += 1
    assert turns == -(-len(slots.closed) // MAX_GIVEN_BACK), "a few slots each turn"
    assert held_bytes == sorted(held_bytes, reverse=True)
    assert sorted(unpinned) == sorted(slots.closed)
    assert tier.held_bytes == pytest.approx(total_bytes / 4)
    assert in_memory(tier.region) < 0.3 * total_bytes
    tick(3 * total_bytes)
    tick(3 * total_bytes, seconds=CALM_S)
    assert slots.usable_count == SLOTS * 3 // 4
    tick(initial_bytes, seconds=CALM_S)
    assert (slots.usable_count, slots.closed) == (SLOTS, [])
    fill(tier, range(SLOTS), first_expert=5)


@pytest.mark.parametrize(
    "error", [GpuError("cuMemHostUnregister says no"), OSError(95, "no holes")]
)
def test_memory_that_cannot_be_given_back_is_kept_and_said_once(tier, caplog, error):
    cache = CacheBench((SLOTS,), (4,), (0, 0, 0, 0), 16).cache
    (slots,) = cache.classes
    total_bytes = tier.layout.total_bytes
    fill(tier, range(SLOTS))
    initial_bytes = 32 * total_bytes  # it is short of what is left
    plan = HostPlan(tier.layout, (4,), total_bytes, total_bytes // 4, total_bytes, 0, initial_bytes)
    now_s = iter(range(1, 100))

    def refuse(slot):
        raise error

    governor = HostGovernor(
        plan, cache, tier, refuse, lambda: total_bytes // 2, lambda: float(next(now_s))
    )
    for _ in range(5):
        governor.tick()
    assert not governor.busy
    assert slots.closed, "it has tried"
    assert tier.held_bytes == pytest.approx(total_bytes)
    messages = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert messages == [f"memory cannot be given back, and will not be any more: {error}"]
