"""What becomes of a slab that could not be read: who is told, and how loudly."""

from types import SimpleNamespace

import pytest

from shared.errors import ModelChanged, ReadFailed
from shared.wire import Failed
from streamd.scheduling.arrivals import Arrivals, Arrived

SLOT = 3
BROKEN = ReadFailed("reading m.gguf failed", "check the disk")
CHANGED = ModelChanged("m.gguf has been replaced", "streamd reload")


class FakeTier:
    """Slabs have ended, badly if there is an error."""

    def __init__(self, error, slots=(SLOT,)):
        self.error, self.slots = error, slots

    def poll(self):
        return [SimpleNamespace(key=slot, error=self.error) for slot in self.slots]

    def arrived(self, slot, error):
        return error


class FakeSessions:
    def __init__(self):
        self.rung = []

    def of_number(self, number):
        return SimpleNamespace(ticket=number + 100)

    def ring(self, numbers):
        self.rung += numbers


class FakeScheduler:
    """waiting: for each slot, the clients that wait for it."""

    def __init__(self, asked=(), waiting=None):
        self.asked, self.waiting = asked, waiting
        self.cache = SimpleNamespace(clients={7: SimpleNamespace(ours=False)})

    def landed(self, slot):
        return self.waiting[slot]

    def failed(self, slot):
        assert slot == SLOT
        return 1, 2, self.asked


@pytest.mark.parametrize(
    ("asked", "error", "levels"),
    [
        ([(7, 40)], BROKEN, ["ERROR"]),
        ([], BROKEN, ["DEBUG"]),
        ([], CHANGED, ["ERROR"]),
    ],
)
def test_a_slab_that_nobody_asked_for_is_no_error(asked, error, levels, caplog):
    caplog.set_level("DEBUG")
    told = []
    model = SimpleNamespace(tier=FakeTier(error), scheduler=FakeScheduler(asked), gpu=None)
    sessions = FakeSessions()
    arrivals = Arrivals(model, sessions, lambda ticket, message: told.append((ticket, message)))
    assert arrivals.take() == Arrived(1, error if error is CHANGED else None)
    assert [record.levelname for record in caplog.records] == levels
    expected = Failed(40, 1, 2, error.code, error.message, error.remedy)
    assert told == [(107, expected) for _ in asked]
    assert sessions.rung == []


def test_who_waits_for_several_of_the_slabs_is_rung_once():
    sessions = FakeSessions()
    scheduler = FakeScheduler(waiting={3: [7], 4: [7, 9], 5: []})
    model = SimpleNamespace(tier=FakeTier(None, (3, 4, 5)), scheduler=scheduler, gpu=None)
    assert Arrivals(model, sessions, lambda *_: None).take() == Arrived(3, None)
    assert sorted(sessions.rung) == [7, 9]
