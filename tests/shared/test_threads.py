"""A thread that the system refuses is an error with a remedy."""

import threading

import pytest

from shared.errors import ConfigError
from shared.threads import start_thread


def test_it_runs():
    done = threading.Event()
    start_thread(threading.Thread(target=done.set, daemon=True))
    assert done.wait(5)


def test_one_that_is_refused(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ConfigError, match=r"cannot start the thread 'name': can't start") as caught:
        start_thread(threading.Thread(target=print, name="name"))
    assert "ulimit" in caught.value.remedy
