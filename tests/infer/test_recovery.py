"""Waiting for a daemon that has gone, and an engine that goes on with the next one."""

import gc
import time
import weakref
from contextlib import ExitStack
from pathlib import Path

import pytest

from infer.engine import MAX_LOSSES, Engine
from infer.recovery import Recovery
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
    """What a model is bound to."""


class _Client:
    """Of a daemon that ends after some computations; the next one serves them."""

    def __init__(self, engine: "_LosingEngine") -> None:
        self._engine = engine

    def detach(self) -> None:
        self._engine.events.append("detach")


class _LosingEngine(Engine):
    """An engine without a model: only what it does when its daemon has gone."""

    def __init__(self, loss_count: int, recovery: Recovery | None) -> None:
        self.recovery = recovery
        self.events: list[str] = []
        self.client = _Client(self)
        self._lost = None
        self._losses_left = loss_count
        self.model = _Memory()

    def compute(self) -> str:
        memory = self.model
        if self._losses_left:
            self._losses_left -= 1
            raise DaemonLost(f"gone with {id(memory)}")
        return "done"

    def _return(self) -> None:
        self.events.append("attach")
        self.model = _Memory()
        self._lost = None


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
    engine = _LosingEngine(2, recovery)
    recovery.watched = weakref.ref(engine.model)
    assert engine.redo_if_lost(engine.compute) == "done"
    assert engine.events == ["detach", "attach", "detach", "attach"]
    assert recovery.alive == [False, False]
    assert engine.redo_if_lost(engine.compute) == "done"
    assert len(engine.events) == 4


def test_without_a_recovery_it_is_lost_at_once():
    engine = _LosingEngine(1, None)
    with pytest.raises(DaemonLost):
        engine.redo_if_lost(engine.compute)
    assert engine.events == []


def test_what_ends_every_daemon_is_not_tried_for_ever():
    engine = _LosingEngine(100, _Patient())
    with pytest.raises(DaemonLost):
        engine.redo_if_lost(engine.compute)
    assert engine.events.count("detach") == MAX_LOSSES


class _Interrupted(_Patient):
    def wait(self, lost: DaemonLost, lost_at_s: float) -> None:
        if not self.alive:
            self.alive.append(True)
            raise KeyboardInterrupt


def test_after_ctrl_c_in_a_wait_the_next_message_attaches():
    engine = _LosingEngine(1, _Interrupted())
    with pytest.raises(KeyboardInterrupt):
        engine.redo_if_lost(engine.compute)
    assert engine.redo_if_lost(engine.compute) == "done"
    assert engine.events == ["detach", "attach"]
