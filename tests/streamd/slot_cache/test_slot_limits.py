"""Slots taken out of use while clients go on: nobody is torn, nobody waits for ever."""

import random

import pytest
from cache_bench import CacheBench
from cache_world import CacheWorld, Setup, Whim

from shared.errors import PlanError
from streamd.slot_cache.cache_integrity import check_integrity
from streamd.slot_cache.grants import Wishes
from streamd.slot_cache.slot_limits import close_slots, open_slots

N_EXPERTS = 8


def test_slots_nobody_has_used_are_closed_at_once():
    bench = CacheBench(class_slots=(10,))
    slots = bench.cache.classes[0]
    close_slots(bench.cache, slots, 4)
    assert (slots.usable_count, len(slots.closed), len(slots.free)) == (6, 4, 6)
    open_slots(slots, 3)
    assert (slots.usable_count, len(slots.closed)) == (9, 1)
    bench.check(bench.cache)


def test_what_a_client_reads_is_closed_when_it_has_left():
    bench = CacheBench(class_slots=(8,), waves=(2,))
    slots = bench.cache.classes[0]
    client = bench.attach(0)
    for experts in ([0, 1], [2, 3], [4, 5]):
        bench.has_read(client, 1, experts)
    client.enter()
    assert len(slots.free) == 2, "the reserve"
    close_slots(bench.cache, slots, 3)
    assert (slots.usable_count, len(slots.closed)) == (5, 0)
    bench.check(bench.cache)
    client.fetch(1, [6, 7])
    bench.step()
    assert len(bench.reads) == 2, "of the reserve"
    assert len(slots.closed) == 0
    client.leave()
    bench.cache.reclaim()
    assert (slots.usable_count, len(slots.closed)) == (5, 3)
    bench.check(bench.cache)


def test_the_clients_floor_stays():
    bench = CacheBench(class_slots=(9,), waves=(2,))
    slots = bench.cache.classes[0]
    bench.attach(0)
    bench.attach(1)
    close_slots(bench.cache, slots, 9)
    assert slots.usable_count == 8
    with pytest.raises(PlanError, match="has 8 slots"):
        bench.attach(2)
    bench.check(bench.cache)


def test_the_hottest_stay():
    bench = CacheBench(class_slots=(8,), waves=(1,))
    client = bench.attach(0)
    for expert in range(6):
        bench.has_read(client, 1, [expert])
        client.has_used(1, expert, 10 * expert)
    bench.now_ms += 10
    close_slots(bench.cache, bench.cache.classes[0], 6)
    assert bench.resident(1) == {5}, "and a slot is kept in reserve"


def test_a_class_that_holds_all_is_left_alone():
    bench = CacheBench(class_slots=(32,), waves=(16,))
    assert bench.cache.classes[0].holds_all
    close_slots(bench.cache, bench.cache.classes[0], 5)
    assert bench.cache.classes[0].usable_count == 32


def walk(world: CacheWorld, rng: random.Random) -> None:
    """One event, the closing and opening of slots among them."""
    (slots,) = world.cache.classes
    closed_before = set(slots.closed)
    dice = rng.random()
    experts = tuple(rng.sample(range(N_EXPERTS), N_EXPERTS))
    if dice < 0.6:
        kind = rng.choice(["on"] * 8 + ["leave", "again"])
        world.do(Whim(rng.randrange(3), kind, rng.randrange(2), experts))
    elif dice < 0.8:
        keys = tuple(rng.choices(range(2 * N_EXPERTS), k=rng.choice([0, 2])))
        moves = [
            [Whim(rng.randrange(3), "on", rng.randrange(2), experts)]
            for _ in range(rng.randrange(5))
        ]
        world.step(100, moves, Wishes(keys, rng.randrange(2), keys))
        world.stop_holding(rng.randrange(6))
    elif dice < 0.9:
        for slot in rng.sample(sorted(world.bench.reads), min(2, len(world.bench.reads))):
            world.finish(slot)
    else:
        world.moves = [[Whim(rng.randrange(3), "on", 0, experts)] for _ in range(3)]
        if rng.random() < 0.6:
            close_slots(world.cache, slots, rng.randrange(1, 5))
        else:
            open_slots(slots, rng.randrange(1, 5))
        world.moves = []
    for slot in set(slots.closed) - closed_before:
        # Its memory may be given back from now on: whoever still reads it would see that.
        world.writes[slot] = world.writes.get(slot, 0) + 1


@pytest.mark.parametrize("seed", range(6))
def test_random_walks_with_a_changing_limit(seed):
    rng = random.Random(seed)
    for _ in range(40):
        setup = Setup(
            (rng.randint(1, 2),), (rng.randint(0, 4),), rng.randint(1, 3), (0, 0), N_EXPERTS
        )
        world = CacheWorld(setup)
        for _ in range(rng.choice([50, 200])):
            walk(world, rng)
        check_integrity(world.cache)
        world.drain()
