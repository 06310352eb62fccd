"""The daemon as a service: what its manager hears, and the configuration that belongs to a name."""

import json
import signal
import socket

import pytest

WATCHDOG_S = 2.0


class Manager:
    """The end of $NOTIFY_SOCKET that systemd holds."""

    def __init__(self, place, monkeypatch) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path = place.directory / "notify"
        self._listener.bind(str(path))
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_S * 1e6)))

    def hear(self, deadline_s: float = 60.0) -> list[str]:
        """The lines of the next message; [] if none comes in time."""
        self._listener.settimeout(deadline_s)
        try:
            return self._listener.recv(4096).decode().splitlines()
        except TimeoutError:
            return []

    def hear_until(self, line: str) -> list[str]:
        """All lines up to that one, watchdog's food left out."""
        heard: list[str] = []
        while line not in heard:
            message = self.hear()
            assert message, f"{line} does not come after {heard}"
            heard += [word for word in message if word != "WATCHDOG=1"]
        return heard

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def manager(place, monkeypatch):
    manager = Manager(place, monkeypatch)
    yield manager
    manager.close()


def test_the_manager_hears_of_a_life(manager, place, demo_model, slab_reader):
    daemon = place.start_daemon(demo_model, "--name", "demo", "--host-cache", "6M")
    loading, *_ = manager.hear_until("READY=1")
    assert loading == f"STATUS=loading {demo_model.name}"
    assert "serving" in daemon.log.read_text(), "ready only once the model is loaded"
    reader = slab_reader.SlabReader(demo_model, "demo")
    manager.hear_until(f"STATUS=serving {demo_model.name}, clients: 1")
    reader.close()
    manager.hear_until(f"STATUS=serving {demo_model.name}, clients: 0")
    daemon.process.send_signal(signal.SIGHUP)
    manager.hear_until("RELOADING=1")
    manager.hear_until("READY=1")
    daemon.process.send_signal(signal.SIGTERM)
    manager.hear_until("STOPPING=1")
    assert daemon.process.wait(30) == 0


def test_the_watchdog_is_fed_as_long_as_the_loop_turns(manager, place, demo_model, monkeypatch):
    hang = place.directory / "hang"
    monkeypatch.setenv("HANG_AT", str(hang))
    daemon = place.daemon(demo_model, "--name", "demo", program="daemon_that_hangs.py")
    manager.hear_until("READY=1")
    for _ in range(2):
        assert manager.hear(WATCHDOG_S) == ["WATCHDOG=1"]
    hang.touch()
    sent_before = 0  # what it had sent when it saw the file
    while manager.hear(WATCHDOG_S):
        sent_before += 1
        assert sent_before <= 2, "it is fed although the loop hangs"
    assert place.state_of(daemon.pid), "it hangs, it has not ended"
    # The manager would end it now; its log says where each thread was.
    daemon.process.send_signal(signal.SIGABRT)
    assert daemon.process.wait(30) == -signal.SIGABRT
    log = daemon.log.read_text()
    assert "_wait_or_hang" in log
    for leftover in place.runtime_dir.iterdir():  # it could not
        leftover.unlink()


def test_a_name_has_its_configuration(place, demo_model, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place.directory / "config"))
    directory = place.directory / "config" / "streamd"
    directory.mkdir(parents=True)
    path = directory / "mine.toml"
    path.write_text(f"model = {json.dumps(str(demo_model))}\nhost-cache = '6M'\n")
    done = place.run("streamd", "plan", "--name", "mine", "--json")
    assert json.loads(done.stdout)["budget_bytes"] == 6 << 20
    done = place.run("streamd", "plan", "--name", "mine", "--json", "--host-cache", "7M")
    assert json.loads(done.stdout)["budget_bytes"] == 7 << 20
    path.write_text("hots-cache = '6M'\n")
    done = place.run("streamd", "--name", "mine")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{path}: unknown option 'hots-cache'" in done.stderr
