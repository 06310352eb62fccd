"""What the service manager hears, over real sockets."""

import os
import socket

import pytest

from streamd.monitoring.notify import Notifier


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    """A socket as systemd opens it, and how $NOTIFY_SOCKET names it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    name = str(tmp_path / "n") if request.param == "path" else f"@streamd-test-{os.getpid()}"
    listener.bind(name.replace("@", "\0"))
    listener.setblocking(False)
    yield listener, name
    listener.close()


def heard(listener):
    messages = []
    while True:
        try:
            messages.append(listener.recv(4096).decode())
        except BlockingIOError:
            return messages


def test_a_life(manager):
    listener, name = manager
    notifier = Notifier({"NOTIFY_SOCKET": name})
    notifier.ready("serving")
    notifier.status("1 client")
    notifier.reloading()
    notifier.stopping()
    ready, status, reloading, stopping = heard(listener)
    assert ready == "READY=1\nSTATUS=serving"
    assert status == "STATUS=1 client"
    assert reloading.startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert reloading.rpartition("=")[2].isdecimal()
    assert stopping == "STOPPING=1"


def test_the_watchdog_is_fed_four_times_as_often_as_it_bites(manager):
    listener, name = manager
    clock = Clock()
    notifier = Notifier(
        {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "8000000", "WATCHDOG_PID": str(os.getpid())}, clock
    )
    for _ in range(8):
        clock.now_s += 1.0
        notifier.alive()
    assert heard(listener) == ["WATCHDOG=1"] * 4


@pytest.mark.parametrize(
    "watchdog",
    [
        {},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"},
    ],
)
def test_no_watchdog_no_food(manager, watchdog):
    listener, name = manager
    clock = Clock()
    notifier = Notifier({"NOTIFY_SOCKET": name, **watchdog}, clock)
    clock.now_s += 3600
    notifier.alive()
    assert heard(listener) == []


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": "/nowhere/at/all"}])
def test_nobody_listens(environment):
    notifier = Notifier(environment)
    notifier.ready("serving")
    notifier.stopping()


def test_an_at_sign_within_a_path_is_one(tmp_path):
    path = tmp_path / "user@1000"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        Notifier({"NOTIFY_SOCKET": str(path)}).stopping()
        assert listener.recv(100) == b"STOPPING=1"


def test_a_manager_that_does_not_read_holds_nobody_up(manager):
    listener, name = manager
    notifier = Notifier({"NOTIFY_SOCKET": name})
    for _ in range(2000):  # more than its queue takes
        notifier.status("x" * 100)
    assert 0 < len(heard(listener)) < 2000
