"""Names, sockets and lock files of daemons: claimed by one, found by all, left behind by none."""

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from shared.errors import ConfigError, DaemonBusy
from shared.runtime_dir import (
    MAX_SOCKET_PATH_BYTES,
    DaemonRecord,
    Endpoints,
    claim,
    running_daemons,
    runtime_dir,
)

PROJECT_DIR = Path(__file__).resolve().parents[2]
# Claims the name given, says so, and holds it until its input ends.
HOLDER = """
import sys
from shared.runtime_dir import DaemonRecord, Endpoints, claim
name, model = sys.argv[1:]
with claim(Endpoints.of(name), DaemonRecord(name, 1, model, 1)):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def short_path():
    """Directly in the temporary directory: the paths of sockets may not be long."""
    with tempfile.TemporaryDirectory(prefix="rd-") as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def directory(short_path, monkeypatch):
    path = short_path / "run"
    monkeypatch.setenv("STREAMD_RUNTIME_DIR", str(path))
    return path


def record(name, model="/m.gguf"):
    return DaemonRecord(name, 1, model, 1)


@contextmanager
def held_elsewhere(name, model="/m.gguf"):
    """Another process has the name."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, name, model],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=PROJECT_DIR,
    )
    with process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


# The directory


def test_the_directory_is_made_for_us_alone(directory):
    assert runtime_dir() == directory
    assert directory.stat().st_mode & 0o777 == 0o700


def test_where_it_is(tmp_path, monkeypatch):
    monkeypatch.delenv("STREAMD_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "user"))
    system_dir = tmp_path / "system" / "streamd"
    monkeypatch.setattr("shared.runtime_dir.SYSTEM_DIR", system_dir)
    assert runtime_dir() == tmp_path / "user" / "streamd"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("shared.runtime_dir.os.access", lambda path, mode: False)
    monkeypatch.setattr("shared.runtime_dir.tempfile.gettempdir", lambda: str(tmp_path))
    assert runtime_dir() == tmp_path / f"streamd-{os.getuid()}"
    monkeypatch.setattr("shared.runtime_dir.os.access", lambda path, mode: True)
    assert runtime_dir() == system_dir


def test_a_service_that_runs_as_this_user_is_found_from_a_login(tmp_path, monkeypatch):
    monkeypatch.delenv("STREAMD_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "user"))
    system_dir = tmp_path / "streamd"
    system_dir.mkdir(mode=0o700)
    monkeypatch.setattr("shared.runtime_dir.SYSTEM_DIR", system_dir)
    assert runtime_dir() == system_dir
    # One that runs as somebody else is none of ours.
    monkeypatch.setattr("shared.runtime_dir._is_ours", lambda directory: False)
    assert runtime_dir() == tmp_path / "user" / "streamd"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
def test_a_directory_that_others_may_write_is_refused(directory, mode):
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ConfigError, match="can be written by others") as refusal:
        runtime_dir()
    assert "chmod 700" in refusal.value.remedy


def test_a_directory_of_somebody_else_is_refused(directory, monkeypatch):
    directory.mkdir(mode=0o700)
    monkeypatch.setattr("shared.runtime_dir.os.getuid", lambda: os.geteuid() + 1)
    with pytest.raises(ConfigError, match="belongs to another user") as refusal:
        runtime_dir()
    assert "group" in refusal.value.remedy


@pytest.mark.parametrize("obstacle", ["run", "run/below"])
def test_a_directory_that_cannot_be_made(directory, monkeypatch, obstacle):
    directory.write_text("a file")
    monkeypatch.setenv("STREAMD_RUNTIME_DIR", str(directory.parent / obstacle))
    with pytest.raises(ConfigError, match="cannot make the socket directory") as refusal:
        runtime_dir()
    assert "STREAMD_RUNTIME_DIR" in refusal.value.remedy


# Names


@pytest.mark.parametrize("name", ["a", "Hy3-IQ2_XXS.q", "0", "x" * 64])
def test_names(directory, name):
    endpoints = Endpoints.of(name)
    assert endpoints.unix_path == directory / f"{name}.sock"
    assert endpoints.zmq_url == f"ipc://{directory}/{name}.zmq"
    assert endpoints.lock_path == directory / f"{name}.lock"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "-x", ".hidden", "a/b", "../a", "a b", "a\n", "é", "x" * 65, "a\0"]
)
def test_what_is_no_name(name):
    with pytest.raises(ConfigError, match="cannot be a daemon's name") as refusal:
        Endpoints.of(name)
    assert "letters" in refusal.value.remedy


@pytest.mark.parametrize("letter", ["x", "é"])
def test_a_socket_path_may_be_so_long_and_no_longer(short_path, monkeypatch, letter):
    room_bytes = MAX_SOCKET_PATH_BYTES - len(os.fsencode(short_path)) - len("//daemon.sock")
    wide = len(os.fsencode(letter))
    part = letter * (room_bytes // wide) + "x" * (room_bytes % wide)
    monkeypatch.setenv("STREAMD_RUNTIME_DIR", str(short_path / part))
    assert len(os.fsencode(Endpoints.of("daemon").unix_path)) == MAX_SOCKET_PATH_BYTES
    with pytest.raises(ConfigError, match=f"{MAX_SOCKET_PATH_BYTES} fit") as refusal:
        Endpoints.of("daemons")
    assert "--name" in refusal.value.remedy


# Claims


def test_a_claim_is_seen_while_it_lasts_and_leaves_nothing(directory):
    endpoints = Endpoints.of("one")
    with claim(endpoints, record("one")):
        endpoints.unix_path.touch()
        endpoints.zmq_path.touch()
        assert running_daemons() == [record("one")]
        assert endpoints.lock_path.stat().st_mode & 0o777 == 0o600
    assert running_daemons() == []
    assert list(directory.iterdir()) == []


def test_a_claim_ends_with_an_error_too(directory):
    with pytest.raises(RuntimeError), claim(Endpoints.of("one"), record("one")):
        raise RuntimeError
    assert list(directory.iterdir()) == []


def test_a_name_that_another_process_has(directory):
    with held_elsewhere("taken") as process:
        endpoints = Endpoints.of("taken")
        endpoints.unix_path.touch()
        with (
            pytest.raises(DaemonBusy, match="'taken' is running already") as refusal,
            claim(endpoints, record("taken")),
        ):
            pytest.fail("two have it")
        assert "streamd stop --name taken" in refusal.value.remedy
        assert endpoints.unix_path.exists(), "the owner's socket is left alone"
        with claim(Endpoints.of("other"), record("other")):
            assert [found.name for found in running_daemons()] == ["other", "taken"]
        assert [found.name for found in running_daemons()] == ["taken"]
        process.stdin.close()
        process.wait(10)
    with claim(endpoints, record("taken")):
        pass


def test_what_a_killed_daemon_leaves_is_taken_over(directory):
    with held_elsewhere("dead", model="/a/very/long/path/to/a/model.gguf") as process:
        process.kill()
        process.wait(10)
    endpoints = Endpoints.of("dead")
    assert endpoints.lock_path.exists()
    for leftover in (endpoints.unix_path, endpoints.zmq_path):
        leftover.touch()
    assert running_daemons() == []
    with claim(endpoints, record("dead")):
        assert running_daemons() == [record("dead")], "nothing of the longer record is left"
        assert not endpoints.unix_path.exists()
        assert not endpoints.zmq_path.exists()


def test_of_those_who_claim_at_once_one_has_the_name_at_a_time(directory):
    """Also while the lock file comes and goes with its owners."""
    holders, most, busy = [], [], []

    def claim_and_let_go(number):
        for _ in range(10):
            try:
                with claim(Endpoints.of("one"), record("one")):
                    holders.append(number)
                    time.sleep(0.001)
                    most.append(len(holders))
                    holders.remove(number)
            except DaemonBusy:
                busy.append(number)

    threads = [threading.Thread(target=claim_and_let_go, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}
    assert len(most) + len(busy) == 40
    assert list(directory.iterdir()) == []


def test_whoever_looks_at_a_leftover_does_not_hinder_a_claim(directory):
    endpoints = Endpoints.of("one")
    looker = os.open(endpoints.lock_path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(looker, fcntl.LOCK_SH)
    looked = threading.Timer(0.03, os.close, [looker])
    looked.start()
    with claim(endpoints, record("one")):
        assert running_daemons() == [record("one")]
    looked.join()


def test_a_lock_file_that_its_owner_removes_as_we_lock_it_is_not_the_one(monkeypatch):
    endpoints = Endpoints.of("one")
    locked = []

    def flock(fd, operation):
        fcntl.flock(fd, operation)
        if not locked:
            endpoints.lock_path.unlink()
        locked.append(fd)

    fake = SimpleNamespace(**vars(fcntl) | {"flock": flock})
    monkeypatch.setattr("shared.runtime_dir.fcntl", fake)
    with claim(endpoints, record("one")):
        assert running_daemons() == [record("one")]
    assert len(locked) >= 2


def test_a_lock_file_that_cannot_be_one(directory):
    endpoints = Endpoints.of("one")
    endpoints.lock_path.mkdir()
    with (
        pytest.raises(ConfigError, match=r"cannot lock .*one\.lock") as refusal,
        claim(endpoints, record("one")),
    ):
        pytest.fail("a directory was locked")
    assert "STREAMD_RUNTIME_DIR" in refusal.value.remedy


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"name": "one"}', b'{"nonsense": 1}'],
)
def test_a_record_that_makes_no_sense_is_no_daemon(content):
    endpoints = Endpoints.of("one")
    with claim(endpoints, record("one")):
        endpoints.lock_path.write_bytes(content)
        assert running_daemons() == []


def test_a_record_is_plain_json():
    endpoints = Endpoints.of("one")
    with claim(endpoints, record("one", model="/模型.gguf")):
        assert json.loads(endpoints.lock_path.read_text()) == {
            "name": "one", "pid": 1, "model": "/模型.gguf", "version": 1, "mtp": "",
        }  # fmt: skip
