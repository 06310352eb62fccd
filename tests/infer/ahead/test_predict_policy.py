"""Which hints go out, given what is predicted, what is there and how idle the disk is."""

import numpy as np
import pytest

from infer.ahead.idle_hints import DEPTH_WINDOW_TOKENS
from infer.ahead.likelihood import LEAST_LIKELY
from infer.ahead.prefetch import Prefetch, margin_count
from infer.ahead.prefetch_trial import FIRST_TRIAL_TOKENS
from infer.daemon.waits import Waits

LAYERS = (1, 2, 3, 4)
N_EXPERTS, TOP_K = 16, 4


class World:
    """A cache, a disk and a clock; it is the sink of hints, and decodes."""

    has_source = False

    def __init__(self, depth=None, layer_s=0.01, slab_s=0.001):
        self.resident = np.zeros((max(LAYERS) + 1, N_EXPERTS), bool)
        self.waits = Waits()
        self.hints = []
        self.layer_s, self.slab_s = layer_s, slab_s
        self.now_s = 0.0
        self.reads_all_hints = False
        self.prefetch = Prefetch(LAYERS, N_EXPERTS, TOP_K, self, depth, lambda: self.now_s)

    def absent(self, layer, experts):
        return ~self.resident[layer][experts]

    def is_complete(self, layer):
        return bool(self.resident[layer].all())

    def hint(self, layer, experts, layers_ahead, upload_count):
        self.hints.append((layer, experts.tolist(), layers_ahead))
        if self.reads_all_hints:
            self.resident[layer, experts] = True

    def token(self, choose, guess):
        """choose(layer) -> ids; guess(layer, distance) -> ranked ids. A miss waits for its slab."""
        for layer in (0, *LAYERS):
            targets = self.prefetch.targets(layer)
            if layer in LAYERS:
                ids = np.asarray(choose(layer))
                self.prefetch.chosen(layer, ids.tolist())
                missing = int(self.absent(layer, ids).sum())
                wait_s = missing * self.slab_s
                self.waits.waited_s += wait_s
                self.waits.served_s += wait_s
                self.waits.served_count += missing
                self.now_s += wait_s
            ranked = {target: np.asarray(guess(target[1], target[0])) for target in targets}
            if ranked:
                self.prefetch.forecast(ranked)
            self.now_s += self.layer_s


CANDIDATES = TOP_K + margin_count(TOP_K)


def _choose(layer):
    return np.arange(TOP_K) + layer


def _right(layer, _distance):
    others = [e for e in range(N_EXPERTS) if e not in _choose(layer)]
    return np.array([*_choose(layer), *others][:CANDIDATES])


def _wrong(layer, _distance):
    return np.array([e for e in range(N_EXPERTS) if e not in _choose(layer)][:CANDIDATES])


def test_right_guesses_go_out_a_layer_ahead():
    world = World(depth=1)
    world.token(_choose, _right)
    assert [(layer, ahead) for layer, _, ahead in world.hints] == [(n, 1) for n in LAYERS]
    assert all(set(_choose(layer)) <= set(experts) for layer, experts, _ in world.hints)


def test_people_are_told_nothing_where_nothing_was_predicted():
    world = World(depth=1)
    assert world.prefetch.describe() == ""
    world.token(_choose, _right)
    assert world.prefetch.describe().startswith("1 layer; 100% of the choices foreseen; ")
    assert world.prefetch.describe(world.prefetch.counters.copy()) == ""


def test_what_is_there_is_not_hinted_and_complete_layers_are_not_guessed():
    world = World(depth=3)
    world.resident[:] = True
    assert not world.prefetch.targets(0)
    world.resident[2, 3] = False
    assert list(world.prefetch.targets(1)) == [(1, 2)]
    world.resident[3, 5] = False
    world.token(_choose, _right)
    assert {(layer, *experts) for layer, experts, _ in world.hints} == {(2, 3), (3, 5)}


@pytest.mark.parametrize("depth", [1, 3])
def test_one_message_a_layer_at_the_most_and_nothing_twice_a_token(depth):
    world = World(depth=depth, layer_s=0.3, slab_s=1.0)
    for _ in range(50):  # until it knows that a slab takes longer than a layer
        world.hints.clear()
        world.token(_choose, _right)
    assert len(world.hints) <= len(LAYERS) + 1
    told = [(layer, expert) for layer, experts, _ in world.hints for expert in experts]
    assert len(told) == len(set(told))
    assert max(ahead for _, _, ahead in world.hints) == depth


def test_unlikely_guesses_are_not_hinted():
    world = World(depth=1)
    for _ in range(200):
        world.token(_choose, _wrong)
    world.hints.clear()
    world.token(_choose, _wrong)
    assert not world.hints
    assert max(world.prefetch.likelihood.at(1)) < LEAST_LIKELY


def test_a_busy_disk_gets_few_hints_and_an_idle_one_many():
    """By time: a layer's computing lasts a tenth of a slab's reading, or ten times as long."""
    counts = []
    for layer_s in (0.1, 10.0):
        world = World(layer_s=layer_s, slab_s=1.0)
        for _ in range(FIRST_TRIAL_TOKENS - 1):
            world.token(_choose, _right)
        counts.append(world.prefetch.counters.hinted)
    assert counts[0] <= 0.15 * (len(LAYERS) + 1) * FIRST_TRIAL_TOKENS
    assert counts[1] > 10 * counts[0]


def test_it_looks_farther_while_the_disk_is_idle():
    world = World(layer_s=10.0, slab_s=1.0)
    for _ in range(DEPTH_WINDOW_TOKENS + 2):
        world.token(_choose, _right)
    assert world.prefetch.depth > 1


def test_it_looks_as_far_as_it_takes_to_read_a_slab():
    world = World(layer_s=0.3, slab_s=1.0)
    for _ in range(FIRST_TRIAL_TOKENS - 1):
        world.token(_choose, _right)
    assert world.prefetch.depth == 3


def test_it_stays_near_while_the_idle_time_is_used_up():
    world = World(layer_s=2.0, slab_s=1.0)
    for _ in range(FIRST_TRIAL_TOKENS - 1):
        world.token(_choose, _right)
    assert world.prefetch.depth == 1


def test_it_switches_itself_off_where_it_costs():
    """Hints bring nothing here, and each token that gives any is slower."""

    class Costly(World):
        def hint(self, layer, experts, layers_ahead, upload_count):
            super().hint(layer, experts, layers_ahead, upload_count)
            self.now_s += 0.1

    world = Costly(layer_s=1.0, slab_s=0.1)
    for _ in range(2 * FIRST_TRIAL_TOKENS):
        world.token(_choose, _right)
    assert not world.prefetch.is_on
    assert world.prefetch.values()["depth"] == 0
    assert not world.prefetch.targets(0)


def test_a_fixed_depth_is_never_switched_off():
    world = World(depth=2, layer_s=0.1, slab_s=1.0)
    for _ in range(3 * FIRST_TRIAL_TOKENS):
        world.token(_choose, _right)
    assert world.prefetch.is_on
    assert world.prefetch.depth == 2


def test_counters_tell_right_from_late_and_wrong():
    world = World(depth=1)
    world.reads_all_hints = True
    world.token(_choose, _right)
    counters = world.prefetch.counters
    assert counters.predicted == counters.recalled == counters.within == TOP_K * len(LAYERS)
    assert counters.used == counters.ready == TOP_K * len(LAYERS)
    assert counters.hinted > counters.used  # the margin

    late = World(depth=1)
    late.token(_choose, _right)
    assert late.prefetch.counters.used == TOP_K * len(LAYERS)
    assert late.prefetch.counters.ready == 0

    before = counters.copy()
    world.token(_choose, _right)
    grown = world.prefetch.values(before)
    assert (grown["predicted"], grown["recall"]) == (TOP_K * len(LAYERS), 1.0)


def test_what_was_cut_short_is_forgotten():
    world = World(depth=1)
    targets = world.prefetch.targets(0)
    world.prefetch.forecast({target: _right(target[1], 1) for target in targets})
    assert world.hints
    world.prefetch.pause()
    world.prefetch.chosen(1, _choose(1).tolist())
    assert world.prefetch.counters.predicted == world.prefetch.counters.used == 0
