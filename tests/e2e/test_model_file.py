"""The model file under a running daemon: changed, replaced, reloaded, in memory, read wrongly."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.errors import DaemonLost, ModelChanged, ReadFailed
from streamd.readers.direct import open_file

FLOOR = "6M"
NOTICED_WITHIN_S = 10.0


@pytest.fixture
def model(demo_model, tmp_path) -> Path:
    """A copy that may be ruined."""
    path = tmp_path / "model.gguf"
    shutil.copy(demo_model, path)
    return path


@pytest.fixture
def daemon(place, model) -> Any:
    return place.daemon(model, "--name", "demo", "--host-cache", FLOOR)


@pytest.fixture
def attach(slab_reader, daemon, demo_model) -> Iterator[Callable[[Path], Any]]:
    """`attach(model)`: a client that compares what it is given with the demo model's bytes."""
    readers = []

    def attach(model: Path) -> Any:
        reader = slab_reader.SlabReader(model, "demo", compare_with=demo_model)
        readers.append(reader)
        return reader

    yield attach
    for reader in readers:
        reader.close()


def read_everything(reader: Any) -> None:
    count = reader.experts.top_k
    for layer in reader.layers:
        for first in range(0, reader.experts.n_experts, count):
            reader.read(layer, np.arange(first, first + count))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def rewrite(path: Path) -> None:
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(len(content) // 2)
        file.write(bytes(byte ^ 0xFF for byte in content[len(content) // 2 :]))


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    shutil.copy(path, other)
    os.replace(other, path)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [truncate, rewrite, replace, remove])
def test_a_file_that_changes_is_served_no_more(change, place, model, daemon, attach):
    reader = attach(model)
    read_everything(reader)
    change(model)
    # At once where a read tells, else within the interval at which the file is looked at.
    with pytest.raises(ModelChanged) as caught:
        place.wait_until(lambda: read_everything(reader), "a refusal", NOTICED_WITHIN_S)
    assert str(model) in caught.value.message
    assert reader.torn_count == 0, "nothing but the old bytes has been served"
    fault = place.wait_until(lambda: place.stats("demo")["fault"], "a notice", NOTICED_WITHIN_S)
    assert str(model) in fault
    assert str(model) in daemon.log.read_text()
    assert daemon.process.poll() is None


@pytest.mark.parametrize("change", [replace, remove])
def test_an_idle_daemon_notices_too_and_lets_nobody_in(change, place, model, daemon, attach):
    reader = attach(model)
    change(model)
    fault = place.wait_until(lambda: place.stats("demo")["fault"], "a notice", NOTICED_WITHIN_S)
    assert "streamd reload" in fault
    with pytest.raises(ModelChanged, match="reload"):
        reader.read(reader.layers[0], np.arange(4))
    if change is replace:
        with pytest.raises(ModelChanged, match="reload"):
            attach(model)


def reload_by_command(place: Any, daemon: Any) -> None:
    done = place.run("streamd", "reload", "--name", "demo")
    assert (done.returncode, done.stderr) == (0, "")
    assert "anew" in done.stdout


def reload_by_signal(place: Any, daemon: Any) -> None:
    daemon.process.send_signal(signal.SIGHUP)


def test_reloads_do_not_add_up(place, daemon):
    """Each takes the memory and the descriptors of the one before."""

    def held() -> tuple[int, int]:
        maps = Path(f"/proc/{daemon.pid}/maps").read_text().count("/memfd:streamd-slots")
        return maps, len(os.listdir(f"/proc/{daemon.pid}/fd"))

    before = held()
    for _ in range(3):
        reload_by_command(place, daemon)
    place.wait_until(lambda: held() <= before, "the old memory goes")


@pytest.mark.parametrize("reload", [reload_by_command, reload_by_signal])
def test_reload_takes_the_file_as_it_is_now(
    reload, place, model, daemon, attach, gguf_factory, slab_reader
):
    before = attach(model)
    before.read(before.layers[0], np.arange(4))
    new = gguf_factory.hy3_model(n_layers=3, n_experts=12, top_k=3).write(model.with_suffix(".new"))
    os.replace(new, model)
    reload(place, daemon)
    place.wait_until(lambda: daemon.log.read_text().count("serving") == 2, "it serves again")
    with pytest.raises((DaemonLost, ModelChanged)):
        before.read(before.layers[0], np.arange(4, 8))
    after = slab_reader.SlabReader(model, "demo")
    read_everything(after)
    assert (after.torn_count, after.slab_count) == (0, 2 * 12)
    stats = place.stats("demo")
    assert (stats["pid"], stats["fault"]) == (daemon.pid, None)
    after.close()
    daemon.stop()
    assert daemon.process.returncode == 0


def busy_share(pid: int) -> float:
    """Of a core, that a process takes for a while."""

    def cpu_s() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before_s = cpu_s()
    time.sleep(0.5)
    return (cpu_s() - before_s) / 0.5


def be_nonsense(path: Path) -> None:
    path.write_bytes(b"nonsense" * 1000)


@pytest.mark.parametrize("change", [be_nonsense, truncate, remove])
def test_reload_of_a_file_that_is_no_model_any_more_is_refused(change, place, model, daemon):
    sound = model.read_bytes()
    change(model)
    done = place.run("streamd", "reload", "--name", "demo")
    assert (done.returncode, done.stdout) == (1, "")
    assert str(model) in done.stderr
    daemon.process.send_signal(signal.SIGHUP)
    place.wait_until(lambda: "not reloaded" in daemon.log.read_text(), "the signal is refused too")
    place.wait_until(lambda: place.stats("demo")["fault"], "a notice", NOTICED_WITHIN_S)
    assert busy_share(daemon.pid) < 0.5, "it sleeps again"
    shown = place.run("streamd", "stats", "--name", "demo").stdout.splitlines()[0]
    assert shown.startswith("fault")
    assert "streamd reload" in shown
    model.write_bytes(sound)
    reload_by_command(place, daemon)
    place.wait_until(lambda: daemon.log.read_text().count("serving") == 2, "it serves again")
    assert place.stats("demo")["fault"] is None
    assert "Traceback" not in daemon.log.read_text()
    daemon.stop()


def test_a_file_in_memory_is_served(place, demo_model, slab_reader):
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm to write to")
    with tempfile.NamedTemporaryFile(dir="/dev/shm", suffix=".gguf") as file:
        model = Path(file.name)
        shutil.copy(demo_model, model)
        daemon = place.daemon(model, "--name", "memory", "--host-cache", FLOOR)
        reader = slab_reader.SlabReader(model, "memory")
        read_everything(reader)
        read_everything(reader)
        assert reader.torn_count == 0
        reader.close()
        opened = open_file(model)
        opened.close()
        assert ("through the page cache" in daemon.log.read_text()) != opened.direct
        daemon.stop()


def test_verify_catches_what_a_drive_gets_wrong(place, model, slab_reader, monkeypatch):
    sound_reads = 1000  # everything has been read once by then
    monkeypatch.setenv("SOUND_READS", str(sound_reads))
    options = ("--name", "verify", "--host-cache", FLOOR, "--io", "pread", "--verify")
    daemon = place.daemon(model, *options, program="daemon_with_bad_drive.py")
    reader = slab_reader.SlabReader(model, "verify")
    with pytest.raises(ReadFailed, match="not what it was when it was first read") as caught:
        place.wait_until(lambda: read_everything(reader), "a bit is flipped", 30)
    assert "scrub" in caught.value.remedy
    assert reader.torn_count == 0, "wrong bytes have been served"
    assert reader.client.stats()["io"]["reads"] > sound_reads
    reader.close()
    daemon.stop()
    assert daemon.process.returncode == 0
