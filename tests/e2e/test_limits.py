"""A daemon that is denied something: io_uring, descriptors, memory. It says so, and goes on."""

import json
import re
import resource
import socket
from pathlib import Path

import numpy as np
import pytest

from shared.errors import DaemonBusy
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from shared.runtime_dir import Endpoints
from streamd.commands.io_best import IoBest, reads_of, save_best
from streamd.control import MAX_CONNECTIONS

FLOOR = "6M"


def read_everything(reader) -> None:
    count = reader.experts.top_k
    for layer in reader.layers:
        for first in range(0, reader.experts.n_experts, count):
            reader.read(layer, np.arange(first, first + count))


@pytest.mark.parametrize("error", ["EPERM", "ENOSYS"])
def test_without_io_uring_it_reads_with_threads(error, place, demo_model, slab_reader, monkeypatch):
    monkeypatch.setenv("DENIED_WITH", error)
    words = ("--name", "threads", "--host-cache", FLOOR)
    daemon = place.daemon(demo_model, *words, program="daemon_without_io_uring.py")
    assert re.search(r"liburing not usable: .+\n.*uring-api not usable: ", daemon.log.read_text())
    reader = slab_reader.SlabReader(demo_model, "threads")
    read_everything(reader)
    assert reader.torn_count == 0
    assert reader.client.stats()["io"]["engine"] == "pread"
    reader.close()


def test_an_engine_asked_for_by_name_is_not_replaced(place, demo_model, monkeypatch):
    monkeypatch.setenv("DENIED_WITH", "EPERM")
    words = ("serve", "--model", demo_model, "--io", "uring-api")
    done = place.run("daemon_without_io_uring.py", *words)
    assert done.returncode == 1
    assert "uring-api not usable" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_descriptors_clients_are_refused_and_the_daemon_lives_on(
    place, demo_model, slab_reader
):
    daemon = place.daemon(demo_model, "--name", "files", "--host-cache", FLOOR)
    first = slab_reader.SlabReader(demo_model, "files")
    _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    limit = len(list(Path(f"/proc/{daemon.pid}/fd").iterdir())) + 20
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (limit, hard))
    with pytest.raises(DaemonBusy, match=f"of the {limit} files") as caught:
        slab_reader.SlabReader(demo_model, "files")
    assert "ulimit -n" in caught.value.remedy
    read_everything(first)
    assert first.torn_count == 0
    assert len(place.stats("files")["clients"]) == 1
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (limit + 100, hard))
    second = slab_reader.SlabReader(demo_model, "files")
    read_everything(second)
    for reader in first, second:
        reader.close()


def test_one_connection_too_many_is_told_so(place, demo_model, slab_reader):
    place.daemon(demo_model, "--name", "full", "--host-cache", FLOOR)
    idle = []
    for _ in range(MAX_CONNECTIONS):
        idle.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        idle[-1].connect(str(Endpoints.of("full").unix_path))
    with pytest.raises(DaemonBusy, match=f"{MAX_CONNECTIONS} connections"):
        slab_reader.SlabReader(demo_model, "full")
    for connection in idle:
        connection.close()
    place.wait_until(lambda: _may_attach(slab_reader, demo_model), "there is room again")


def _may_attach(slab_reader, model: Path) -> bool:
    try:
        slab_reader.SlabReader(model, "full").close()
    except DaemonBusy:
        return False
    return True


@pytest.mark.parametrize(
    ("spare_mb", "refusal"),
    [
        (12, r"cannot start the thread '[\w-]+'"),
        (36, r"cannot map \d+ bytes of shared memory: Cannot allocate memory"),
    ],
)
def test_memory_that_is_refused_is_told_before_anything_is_served(
    place, demo_model, monkeypatch, spare_mb, refusal
):
    monkeypatch.setenv("SPARE_MB", str(spare_mb))
    words = ("serve", "--model", demo_model, "--host-cache", "24M", "--io", "pread")
    done = place.run("daemon_with_little_memory.py", *words, "--io-depth", 1)
    assert done.returncode == 1
    assert re.search(refusal, done.stderr)
    assert "ulimit -v" in done.stderr
    assert "Traceback" not in done.stderr
    assert place.leftovers() == []


def test_what_bench_io_found_best_is_used_unless_told_otherwise(
    place, demo_model, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    reads = reads_of(demo_model, ExpertIndex.from_gguf(GgufIndex.open(demo_model)))
    save_best(reads, IoBest("pread", 3, 123.0))

    def engine_with(*options: object) -> str:
        daemon = place.daemon(demo_model, "--name", "best", "--host-cache", FLOOR, *options)
        engine = place.stats("best")["io"]["engine"]
        assert "found pread at depth 3 best" in daemon.log.read_text()
        daemon.stop()
        return engine

    assert engine_with() == "pread"
    assert engine_with("--io-depth", 5) == "pread"
    assert engine_with("--io", "paced:1GB/s") == "paced 1 GB/s over pread"
    save_best(reads, IoBest("uring-api", 3, 123.0))
    monkeypatch.setenv("DENIED_WITH", "EPERM")
    words = ("--name", "denied", "--host-cache", FLOOR)
    daemon = place.daemon(demo_model, *words, program="daemon_without_io_uring.py")
    assert place.stats("denied")["io"]["engine"] == "pread"
    daemon.stop()


def test_doctor_scrub_and_bench_io_as_they_are_typed(place, demo_model, tmp_path):
    done = place.run("streamd", "doctor")
    assert done.returncode == int(bool(re.search("(?m)^fail", done.stdout)))
    assert done.stderr == ""
    assert all(re.match(r"(ok|warn|fail) |  ", line) for line in done.stdout.splitlines())
    done = place.run("streamd", "scrub", "--json", "--model", demo_model)
    assert done.returncode == 0
    assert json.loads(done.stdout)["size_bytes"] == demo_model.stat().st_size
    done = place.run("streamd", "bench-io", "--model", tmp_path / "absent.gguf")
    assert (done.returncode, done.stdout) == (1, "")
    assert "absent.gguf" in done.stderr
