"""The host cache in a world where anything may happen: see cache_world.py for what is checked."""

import random

import pytest
from cache_world import CacheWorld, Setup, Whim
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from streamd.slot_cache.cache_integrity import check_integrity
from streamd.slot_cache.grants import Wishes

MOST_CLIENTS = 3
N_EXPERTS = 5
N_LAYERS = 3
LAYER_CLASSES = [(0, 0, 0), (0, 1, 1), (0, -1, 1)]
KINDS = ["on"] * 8 + ["leave", "again"]

setups = st.builds(
    Setup,
    waves=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    extra=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    room_for=st.integers(1, MOST_CLIENTS),
    layer_class=st.sampled_from(LAYER_CLASSES),
    n_experts=st.just(N_EXPERTS),
)
whims = st.builds(
    Whim,
    client=st.integers(0, MOST_CLIENTS - 1),
    kind=st.sampled_from(KINDS),
    layer=st.integers(0, N_LAYERS - 1),
    experts=st.permutations(range(N_EXPERTS)).map(tuple),
)
keys = st.lists(st.integers(0, N_LAYERS * N_EXPERTS - 1), max_size=4).map(tuple)
wishes = st.builds(Wishes, prefetch=keys, spare_count=st.integers(0, 3), backfill=keys)


def of_layers_with_experts(world: CacheWorld, wishes: Wishes) -> Wishes:
    prefetch, backfill = (
        tuple(key for key in keys if world.setup.layer_class[key // N_EXPERTS] >= 0)
        for keys in (wishes.prefetch, wishes.backfill)
    )
    return Wishes(prefetch, wishes.spare_count, backfill)


class CacheMachine(RuleBasedStateMachine):
    @initialize(setup=setups)
    def start(self, setup):
        self.world = CacheWorld(setup)

    @rule(moves=st.lists(whims, min_size=1, max_size=6))
    def clients_move(self, moves):
        for whim in moves:
            self.world.do(whim)

    @rule(
        room_count=st.sampled_from([100, 1, 0]),
        moves=st.lists(st.lists(whims, max_size=3), max_size=5),
        wishes=wishes,
    )
    def step(self, room_count, moves, wishes):
        self.world.step(room_count, moves, of_layers_with_experts(self.world, wishes))

    @rule(index=st.integers(0, 5))
    def nobody_wants_it_after_all(self, index):
        self.world.stop_holding(index)

    @precondition(lambda self: self.world.bench.reads)
    @rule(ends=st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=4))
    def reads_end(self, ends):
        for pick, succeeds in ends[: len(self.world.bench.reads)]:
            slots = sorted(self.world.bench.reads)
            (self.world.finish if succeeds else self.world.fail)(slots[pick % len(slots)])

    @rule(index=st.integers(0, MOST_CLIENTS))
    def one_dies_and_another_comes(self, index):
        if index < MOST_CLIENTS:
            self.world.die(index)
        self.world.attach()

    @rule(elapsed_ms=st.integers(1, 1500))
    def time_passes(self, elapsed_ms):
        self.world.pass_time(elapsed_ms)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()


def test_any_order_of_events():
    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )


def a_setup(rng: random.Random) -> Setup:
    return Setup(
        waves=(rng.randint(1, 2), rng.randint(1, 2)),
        extra=(rng.choice([0, 0, 1, 2]), rng.randint(0, 2)),
        room_for=rng.choice([1, 2, 2, 3]),
        layer_class=rng.choice([*LAYER_CLASSES, LAYER_CLASSES[0]]),
        n_experts=N_EXPERTS,
    )


def a_whim(rng: random.Random, client: int) -> Whim:
    experts = tuple(rng.sample(range(N_EXPERTS), N_EXPERTS))
    return Whim(client, rng.choice(KINDS), rng.randrange(N_LAYERS), experts)


def anything(world: CacheWorld, rng: random.Random, quick_client: int) -> None:
    """One event; each sort about as often as it takes to keep all of them going."""

    def someone():
        return quick_client if rng.random() < 0.8 else rng.randrange(MOST_CLIENTS)

    dice = rng.random()
    if dice < 0.60:
        world.do(a_whim(rng, someone()))
    elif dice < 0.80:
        moves = [[a_whim(rng, someone()) for _ in range(rng.randint(0, 4))] for _ in range(6)]
        prefetch, backfill = (
            tuple(rng.choices(range(N_LAYERS * N_EXPERTS), k=rng.choice([0, 1, 3])))
            for _ in range(2)
        )
        wishes = of_layers_with_experts(world, Wishes(prefetch, rng.randrange(3), backfill))
        world.step(rng.choice([100, 100, 1, 0]), moves if rng.random() < 0.5 else (), wishes)
        world.stop_holding(rng.randrange(6))
    elif dice < 0.95:
        for slot in rng.sample(sorted(world.bench.reads), min(2, len(world.bench.reads))):
            (world.fail if rng.random() < 0.1 else world.finish)(slot)
    elif dice < 0.99:
        world.pass_time(rng.choice([1, 500, 2500]))
    else:
        if rng.random() < 0.7:
            world.die(rng.randrange(MOST_CLIENTS))
        world.attach()


@pytest.mark.parametrize("seed", range(10))
def test_random_walks(seed):
    """Longer than the ones above and many more of them, for what takes a few coincidences."""
    rng = random.Random(seed)
    for _ in range(60):
        world = CacheWorld(a_setup(rng))
        world.bench.check = lambda cache: None
        for _ in range(rng.choice([2, 5, 15])):
            quick_client = rng.randrange(MOST_CLIENTS)
            for _ in range(rng.choice([10, 30])):
                anything(world, rng, quick_client)
            check_integrity(world.cache)
        world.drain()
        check_integrity(world.cache)
