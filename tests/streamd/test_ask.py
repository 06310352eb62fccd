"""Whoever asks a daemon that has ended hears so at once, not at the deadline."""

import tempfile
import threading
import time
from contextlib import ExitStack

import pytest
import zmq

from shared.errors import DaemonLost
from shared.runtime_dir import DaemonRecord, Endpoints, claim
from shared.wire import Stats, encode
from streamd.ask import ask_stats
from streamd.monitoring.stats_watch import watch

SOON_S = 1.0
NAME = "one"


@pytest.fixture
def endpoints(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="ask-") as path:
        monkeypatch.setenv("STREAMD_RUNTIME_DIR", path)
        yield Endpoints.of(NAME)


@pytest.fixture
def daemon(endpoints):
    """Has its name and its socket, and answers nothing; `close` ends it."""
    with ExitStack() as stack:
        stack.enter_context(claim(endpoints, DaemonRecord(NAME, 1, "/m.gguf", 1)))
        context = stack.enter_context(zmq.Context())
        router = stack.enter_context(context.socket(zmq.ROUTER))
        router.setsockopt(zmq.LINGER, 0)
        router.bind(endpoints.zmq_url)
        stack.router = router
        yield stack


def ended_within(run):
    started_s = time.monotonic()
    with pytest.raises(DaemonLost, match=f"the daemon '{NAME}' has ended"):
        run()
    assert time.monotonic() - started_s < SOON_S


def test_one_that_has_stopped(daemon):
    daemon.close()
    ended_within(lambda: ask_stats(NAME))


def test_one_that_was_killed_and_left_its_files(endpoints):
    endpoints.lock_path.touch()
    endpoints.zmq_path.touch()
    ended_within(lambda: ask_stats(NAME))


def test_one_that_ends_before_it_answers(endpoints):
    ends = threading.Event()

    def live():
        with claim(endpoints, DaemonRecord(NAME, 1, "/m.gguf", 1)):
            endpoints.zmq_path.touch()
            alive.set()
            ends.wait()

    alive = threading.Event()
    thread = threading.Thread(target=live)
    thread.start()
    alive.wait()
    threading.Timer(0.1, ends.set).start()
    ended_within(lambda: ask_stats(NAME))
    thread.join()


def test_one_that_lives_and_is_silent(daemon):
    with pytest.raises(DaemonLost, match=r"has not answered for 0\.3 s"):
        ask_stats(NAME, deadline_ms=300)


def test_one_that_ends_while_it_is_watched(daemon, capsys):
    """Between two looks that lie far apart."""

    def answer_and_end():
        peer, _ = daemon.router.recv_multipart()
        daemon.router.send_multipart([peer, encode(Stats({"uptime_s": 1.0, "since_last": {}}))])
        time.sleep(0.1)
        daemon.close()

    thread = threading.Thread(target=answer_and_end)
    thread.start()
    ended_within(lambda: watch(NAME, 60.0, as_json=True, csv_path=None))
    thread.join()
    assert '"uptime_s": 1.0' in capsys.readouterr().out
