"""With the lane on, what the disk has to bring is hinted, and to the host tier."""

from types import SimpleNamespace

import numpy as np
import pytest

from infer.lane.hints import LaneHints


class Tier:
    def __init__(self, *there: int) -> None:
        self.rows = np.full((1, 4), -1, np.int32)
        self.rows[0, list(there)] = 0
        self.waits, self.hints = object(), []

    def absent(self, layer, experts):
        return self.rows[layer][experts] < 0

    def is_complete(self, layer):
        return bool(self.rows[layer].min() >= 0)

    def hint(self, *arguments):
        self.hints.append(arguments)


@pytest.fixture
def world():
    client, host = Tier(0), Tier(0, 1, 2)
    lane = SimpleNamespace(host=host, is_on=True)
    return SimpleNamespace(client=client, host=host, lane=lane, hints=LaneHints(client, lane))


def test_what_is_in_either_tier_is_there_while_the_lane_is_on(world):
    experts = np.arange(4)
    assert world.hints.absent(0, experts).tolist() == [False, False, False, True]
    world.lane.is_on = False
    assert world.hints.absent(0, experts).tolist() == [False, True, True, True]


def test_a_layer_is_complete_by_both_tiers_together(world):
    assert not world.hints.is_complete(0)
    world.client.rows[0, 3] = 5
    assert world.hints.is_complete(0)
    world.lane.is_on = False
    assert not world.hints.is_complete(0)
    world.client.rows[0] = 5
    assert world.hints.is_complete(0)


def test_hints_go_where_they_help(world):
    world.hints.hint(0, np.array([3]), 2, 0)
    assert [hint[2:] for hint in world.host.hints] == [(2, 0)]
    assert not world.client.hints
    assert not world.hints.has_source, "what the host tier has is as good as here"
    world.lane.is_on = False
    world.hints.hint(0, np.array([3]), 2, 1)
    assert [hint[2:] for hint in world.client.hints] == [(2, 1)]
    assert world.hints.has_source
    assert world.hints.waits is world.client.waits
