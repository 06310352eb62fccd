"""Waiting for a daemon that has gone, and an engine that goes on with the next one."""

import gc
import select
import time
import weakref
from contextlib import ExitStack
from pathlib import Path

import pytest

from infer.daemon.lifeline import MAX_LOSSES, Lifeline
from infer.daemon.recovery import Recovery
from shared.errors import DaemonLost, ModelChanged
from shared.runtime_dir import DaemonRecord, Endpoints, claim

LOST = DaemonLost("the daemon 'river' is gone: it ended", "start it")


@pytest.fixture
def runtime(tmp_path, monkeypatch) -> ExitStack:
    """Daemons claim their names in it."""
    monkeypatch.setenv("STREAMD_RUNTIME_DIR", str(tmp_path))
    with ExitStack() as stack:
        yield stack


def _serve(runtime: ExitStack, model: Path) -> None:
    record = DaemonRecord("river", 1, str(model), 1)
    runtime.enter_context(claim(Endpoints.of("river"), record))


@pytest.fixture
def model(tmp_path) -> Path:
    path = tmp_path / "model.gguf"
    path.touch()
    return path


def test_a_daemon_that_runs_is_taken(runtime, model):
    told = []
    _serve(runtime, model)
    Recovery("river", model, 5, tell=told.append).wait(LOST, time.monotonic())
    assert told == [f"{LOST.message}; waiting up to 5 s for it to come back"]


def test_one_that_does_not_come_is_given_up(runtime, model):
    started_s = time.monotonic()
    with pytest.raises(DaemonLost) as raised:
        Recovery("river", model, 0.3, tell=lambda _text: None).wait(LOST, started_s)
    assert raised.value is LOST
    assert 0.3 <= time.monotonic() - started_s < 3


def test_one_that_runs_but_does_not_answer_is_given_up(runtime, model):
    _serve(runtime, model)
    recovery = Recovery("river", model, 5, tell=lambda _text: None)
    with pytest.raises(DaemonLost):
        recovery.wait(LOST, time.monotonic() - 6)


def test_one_of_another_model_is_not_the_one(runtime, model, tmp_path):
    _serve(runtime, tmp_path / "other.gguf")
    recovery = Recovery("river", model, 5, tell=lambda _text: None)
    with pytest.raises(ModelChanged, match=r"'river' serves .*other.gguf now, not .*model.gguf"):
        recovery.wait(LOST, time.monotonic())


def test_one_s_own_is_started_again_once(model):
    starts: list[str] = []
    told: list[str] = []
    recovery = Recovery("mine", model, 5, lambda: starts.append("start"), told.append)
    recovery.wait(LOST, time.monotonic())
    assert starts == ["start"]
    assert told == [f"{LOST.message}; starting it again"]
    with pytest.raises(DaemonLost):
        recovery.wait(LOST, time.monotonic())
    assert starts == ["start"]


class _Memory:
    """What is bound to a daemon."""


class _Client:
    """Of daemons that end so many times while they are asked."""

    def __init__(self, loss_count: int, recovery: Recovery | None) -> None:
        self.events: list[str] = []
        self.memory: _Memory | None = _Memory()
        self.lifeline = Lifeline(self, recovery, self._bind, self._unbind)
        self.losses_left = loss_count
        self.attached = True

    def compute(self) -> str:
        memory = self.memory
        if self.losses_left:
            self.losses_left -= 1
            raise DaemonLost(f"gone with {id(memory)}")
        return "done"

    def attach(self) -> None:
        self.events.append("attach")
        self.attached = True

    def detach(self) -> None:
        self.events.append("detach")
        self.attached = False

    def wait_for_end(self, wake_fd: int) -> bool:
        if self.losses_left:
            return True
        select.select([wake_fd], [], [])
        return False

    def _bind(self) -> None:
        self.memory = _Memory()

    def _unbind(self) -> None:
        self.memory = None


class _Patient(Recovery):
    def __init__(self) -> None:
        super().__init__("river", Path("model.gguf"), 5)
        self.alive: list[bool] = []
        self.watched: weakref.ref | None = None

    def wait(self, lost: DaemonLost, lost_at_s: float) -> None:
        gc.collect()
        self.alive.append(self.watched is not None and self.watched() is not None)


def test_work_is_done_again_and_the_memory_is_free_before_the_wait():
    recovery = _Patient()
    client = _Client(2, recovery)
    recovery.watched = weakref.ref(client.memory)
    assert client.lifeline.redo_if_lost(client.compute) == "done"
    assert client.events == ["detach", "attach", "detach", "attach"]
    assert recovery.alive == [False, False]
    assert client.lifeline.redo_if_lost(client.compute) == "done"
    assert len(client.events) == 4


def test_without_a_recovery_it_is_lost_at_once():
    client = _Client(1, None)
    with pytest.raises(DaemonLost):
        client.lifeline.redo_if_lost(client.compute)
    assert client.events == []


def test_what_ends_every_daemon_is_not_tried_for_ever():
    client = _Client(100, _Patient())
    with pytest.raises(DaemonLost):
        client.lifeline.redo_if_lost(client.compute)
    assert client.events.count("detach") == MAX_LOSSES


class _Interrupted(_Patient):
    def wait(self, lost: DaemonLost, lost_at_s: float) -> None:
        if not self.alive:
            self.alive.append(True)
            raise KeyboardInterrupt


def test_after_ctrl_c_in_a_wait_the_next_message_attaches():
    client = _Client(1, _Interrupted())
    with pytest.raises(KeyboardInterrupt):
        client.lifeline.redo_if_lost(client.compute)
    assert client.lifeline.redo_if_lost(client.compute) == "done"
    assert client.events == ["detach", "attach"]


def test_an_idle_client_lets_go_as_soon_as_its_daemon_ends():
    client = _Client(1, _Patient())
    with client.lifeline.idle():
        end_s = time.monotonic() + 10
        while client.events != ["detach"] and time.monotonic() < end_s:
            time.sleep(0.01)
        assert client.memory is None
    client.losses_left = 0
    with client.lifeline.idle():
        pass  # there is nothing to watch
    assert client.lifeline.redo_if_lost(client.compute) == "done"
    assert client.events == ["detach", "attach"]


def test_an_idle_client_of_a_daemon_that_lives_keeps_everything():
    client = _Client(0, _Patient())
    memory = client.memory
    for _ in range(3):
        with client.lifeline.idle():
            pass
    assert client.lifeline.redo_if_lost(client.compute) == "done"
    assert (client.memory, client.events) == (memory, [])


def test_a_client_that_lost_its_place_attaches_before_it_goes_on():
    """Revoked, and refused when it attached again: the daemon lives, and was full."""
    client = _Client(0, None)
    client.attached = False
    memory = client.memory
    assert client.lifeline.redo_if_lost(client.compute) == "done"
    assert client.events == ["attach"]
    assert client.memory is not memory
