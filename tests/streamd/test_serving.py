"""What a turn of the main loop does first, and what it leaves for later."""

from types import SimpleNamespace

import pytest

from streamd import serving
from streamd.scheduling.arrivals import Arrived
from streamd.serving import LOOK_INTERVAL_MS, Serving


class World:
    """Two tiers that write down what is done with them. waiting: those that somebody waits for."""

    def __init__(self, monkeypatch):
        self.now_ms = 100.0
        self.done = []
        self.arriving = 0
        self.waiting = set()
        self.cannot_serve = False
        monkeypatch.setattr(serving, "now_ms", lambda: self.now_ms)
        host, gpu = self.tier("host"), self.tier("gpu")
        gpu.uploads = SimpleNamespace(
            enter_lanes=lambda: self.done.append("lanes"), go_on=lambda: self.done.append("copies")
        )
        model = SimpleNamespace(
            gpu=gpu, cache=host.cache, scheduler=host.scheduler, tiers={"host": host, "gpu": gpu}
        )
        sessions = SimpleNamespace(ring=lambda numbers: None)
        self.serving = Serving(model, sessions, None, self, 1000)

    def tier(self, name):
        world = self

        class Cache:
            @property
            def waiting(self):
                return name in world.waiting

        class Scheduler:
            cache = Cache()

            def serve(self):
                world.done.append(f"serve {name}")
                if not world.cannot_serve:
                    world.waiting.discard(name)
                return set()

            def step(self):
                world.done.append(f"step {name}")
                return set()

        scheduler = Scheduler()
        return SimpleNamespace(scheduler=scheduler, cache=scheduler.cache)

    def take(self):
        self.done.append("arrivals")
        count, self.arriving = self.arriving, 0
        return Arrived(count, None)

    def steps(self):
        done, self.done = self.done, []
        return [what for what in done if what.startswith("step")]


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def test_who_waits_is_told_of_arrivals_then_served_and_copies_come_last(world):
    world.waiting = {"host", "gpu"}
    world.arriving = 2
    assert world.serving.serve()
    assert world.done == ["arrivals", "serve gpu", "lanes", "serve host", "copies"]
    assert not world.serving.serve()


def test_a_wait_that_cannot_be_ended_yet_is_not_urgent(world):
    """Or the loop would turn for it alone."""
    world.waiting = {"host"}
    world.cannot_serve = True
    assert not world.serving.serve()


def test_what_arrives_between_two_tiers_is_not_left_waiting(world):
    world.serving.look_ahead()
    first, second = (world.done.index(f"step {tier}") for tier in ("host", "gpu"))
    assert "arrivals" in world.done[first:second]


def test_an_idle_loop_looks_ahead_once_in_a_while_and_at_once_when_something_has_happened(world):
    world.serving.look_ahead()
    assert len(world.steps()) == 2
    world.serving.look_ahead()
    assert world.steps() == []
    world.arriving = 1
    world.serving.serve()
    world.serving.look_ahead()
    assert len(world.steps()) == 2
    world.serving.look_soon()
    world.serving.look_ahead()
    assert len(world.steps()) == 2
    world.now_ms += LOOK_INTERVAL_MS
    world.serving.look_ahead()
    assert len(world.steps()) == 2
