"""Hints of a GPU's client: what is likely for its own slots, what is unread for those in RAM."""

import numpy as np
import pytest

from infer.ahead.likelihood import LEAST_LIKELY
from infer.ahead.prefetch import LEAST_LIKELY_UPLOAD, Prefetch
from infer.daemon.waits import Waits

LAYERS = (1, 2, 3)
N_EXPERTS, TOP_K = 16, 4
CHOICE = [3, 5, 7, 9]


class TwoTiers:
    """Nothing is in a GPU slot; what is in RAM is told."""

    has_source = True
    idle_share = 1.0

    def __init__(self, depth=None, in_ram=(), in_gpu=()):
        self.waits = Waits()
        self.in_ram, self.in_gpu = set(in_ram), set(in_gpu)
        self.hints = []
        self.now_s = self.idle_s = 0.0
        self.prefetch = Prefetch(LAYERS, N_EXPERTS, TOP_K, self, depth, lambda: self.now_s)

    def absent(self, _layer, experts):
        return np.array([e not in self.in_gpu for e in experts.tolist()])

    def unread(self, layer, experts):
        return self.absent(layer, experts) & [e not in self.in_ram for e in experts.tolist()]

    @property
    def drive_us(self):
        return int(1e6 * self.idle_s), int(1e6 * self.now_s)

    def is_complete(self, _layer):
        return False

    def hint(self, layer, experts, layers_ahead, upload_count):
        assert layers_ahead == 1 or upload_count == 0
        uploads, reads = experts[:upload_count].tolist(), experts[upload_count:].tolist()
        self.hints.append((layer, layers_ahead, uploads, reads))

    def token(self, guess):
        self.now_s += 0.01
        self.idle_s += 0.01 * self.idle_share
        for layer in (0, *LAYERS):
            targets = self.prefetch.targets(layer)
            if layer:
                self.prefetch.chosen(layer, CHOICE)
            if targets:
                self.prefetch.forecast({target: np.array(guess) for target in targets})

    def hints_for(self, guess, layer=2):
        """Of one token, once it is known how often guesses at each rank are right."""
        for _ in range(300):
            self.token(guess)
        self.hints.clear()
        self.token(guess)
        return [hint[1:] for hint in self.hints if hint[0] == layer]


RIGHT_THEN_WRONG = [3, 5, 7, 0, 1, 2]


def test_what_is_likely_is_for_a_gpu_slot_wherever_it_lies():
    world = TwoTiers(in_ram=[5])
    assert world.hints_for(RIGHT_THEN_WRONG) == [(1, [3, 5, 7], [])]


def test_what_is_less_likely_is_only_read_and_only_if_the_disk_has_to():
    """Every other guess at the first rank is right: too few for an upload."""
    world = TwoTiers(in_ram=[7])
    for _ in range(150):
        world.token([3, 5, 7, 0, 1, 2])
        world.token([0, 5, 7, 3, 1, 2])
    near = world.prefetch.likelihood.at(1)
    assert LEAST_LIKELY < near[0] < LEAST_LIKELY_UPLOAD < near[1]
    world.hints.clear()
    world.token([3, 5, 7, 0, 1, 2])
    assert world.hints[0] == (1, 1, [5, 7], [3, 0])
    assert world.prefetch.counters.reads >= 2
    world.in_ram.add(3)
    world.hints.clear()
    world.token([3, 5, 7, 0, 1, 2])
    assert world.hints[0] == (1, 1, [5, 7], [0])


def test_what_is_there_is_not_hinted():
    world = TwoTiers(in_gpu=[3, 5])
    assert world.hints_for(RIGHT_THEN_WRONG) == [(1, [7], [])]


def test_it_looks_one_layer_ahead_by_itself():
    world = TwoTiers()
    assert world.prefetch.depth == 1
    assert {hint[0] for hint in world.hints_for(RIGHT_THEN_WRONG)} == {1}


def test_from_farther_off_only_reads_are_hinted_and_nothing_twice():
    world = TwoTiers(depth=2)
    assert world.hints_for(RIGHT_THEN_WRONG) == [(2, [], [3, 5, 7]), (1, [3, 5, 7], [])]
    world = TwoTiers(depth=2, in_ram=[3, 5, 7])
    assert world.hints_for(RIGHT_THEN_WRONG) == [(1, [3, 5, 7], [])]


@pytest.mark.parametrize("in_ram", [(), range(N_EXPERTS)])
def test_people_are_told_of_both(in_ram):
    world = TwoTiers(depth=2, in_ram=in_ram)
    world.token(RIGHT_THEN_WRONG)
    world.token(RIGHT_THEN_WRONG)
    described = world.prefetch.describe()
    assert ("more to be read into RAM" in described) == (not in_ram)


def test_a_busy_drive_is_asked_for_the_likeliest_alone():
    """What RAM has is hinted all the same; a depth that was asked for knows no bounds."""
    for depth, read_count in ((None, 0.25), (1, 3)):
        world = TwoTiers(depth=depth, in_ram=[5])
        world.idle_share = 0.0
        for _ in range(300):
            world.token([3, 5, 7, 9, 0, 1])
        world.hints.clear()
        for _ in range(40):
            world.token([3, 5, 7, 9, 0, 1])
        of_layer = [hint for hint in world.hints if hint[0] == 2]
        assert len(of_layer) == 40
        assert all(5 in uploads and not reads for _, _, uploads, reads in of_layer)
        unread = [e for _, _, uploads, _ in of_layer for e in uploads if e != 5]
        assert len(unread) == pytest.approx(40 * read_count, abs=12)
        assert (depth is not None) == (9 in unread)
