"""What becomes of a slab that could not be read: who is told, and how loudly."""

from types import SimpleNamespace

import pytest

from shared.errors import ModelChanged, ReadFailed
from shared.wire import Failed
from streamd.scheduling.arrivals import Arrivals

SLOT = 3
BROKEN = ReadFailed("reading m.gguf failed", "check the disk")
CHANGED = ModelChanged("m.gguf has been replaced", "streamd reload")


class FakeTier:
    """One slab has ended, badly."""

    def __init__(self, error):
        self.error = error

    def poll(self):
        return [SimpleNamespace(key=SLOT, error=self.error)]

    def arrived(self, slot, error):
        return error


class FakeScheduler:
    def __init__(self, asked):
        self.asked = asked
        self.cache = SimpleNamespace(clients={7: SimpleNamespace(ours=False)})

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
    sessions = SimpleNamespace(of_number=lambda number: SimpleNamespace(ticket=number + 100))
    arrivals = Arrivals(model, sessions, lambda ticket, message: told.append((ticket, message)))
    assert arrivals.take() == (error if error is CHANGED else None)
    assert [record.levelname for record in caplog.records] == levels
    expected = Failed(40, 1, 2, error.code, error.message, error.remedy)
    assert told == [(107, expected) for _ in asked]
