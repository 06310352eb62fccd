"""A thread that the system refuses is an error with a remedy."""

import ctypes
import threading

import pytest

from shared.errors import ConfigError
from shared.threads import sleep_exactly, start_thread


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


def test_a_thread_sleeps_exactly():
    """The kernel says what a thread has asked for; others are as they were."""

    def slack_ns():
        return ctypes.CDLL(None).prctl(30, 0, 0, 0, 0)  # PR_GET_TIMERSLACK

    before, found = slack_ns(), []

    def fine():
        sleep_exactly()
        found.append(slack_ns())

    thread = threading.Thread(target=fine)
    thread.start()
    thread.join()
    assert found == [1000]
    assert slack_ns() == before
