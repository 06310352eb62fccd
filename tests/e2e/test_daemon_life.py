"""A daemon's name, its end, and what it tells about itself."""

import json
import re
import signal
import subprocess

import numpy as np
import pytest

from shared.errors import DaemonLost
from shared.runtime_dir import running_daemons


@pytest.fixture
def daemon(place, demo_model):
    return place.daemon(demo_model, "--name", "demo", "--host-cache", "6M")


def test_its_name_is_its_own(place, daemon, demo_model):
    done = place.run("streamd", "--model", demo_model, "--name", "demo")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "streamd: a daemon named 'demo' is running already",
        "  give another --name, or stop it with: streamd stop --name demo",
    ]
    assert place.stats("demo")["pid"] == daemon.pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(number, place, daemon, slab_reader, demo_model):
    reader = slab_reader.SlabReader(demo_model, "demo")
    daemon.process.send_signal(number)
    assert daemon.process.wait(30) == 0
    assert place.leftovers() == []
    assert "Traceback" not in daemon.log.read_text()
    with pytest.raises(DaemonLost, match="the daemon 'demo' is gone"):
        reader.read(reader.layers[0], np.arange(4))
    reader.close()


def test_stop(place, daemon):
    done = place.run("streamd", "stop")
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped demo\n", "")
    assert daemon.process.wait(30) == 0
    assert place.leftovers() == []


TIER_KEYS = {"hits", "misses", "evictions", "slots", "slots_used", "bytes"}
IO_KEYS = {"engine", "bytes_read", "reads", "latency_ms_p50", "latency_ms_p99", "in_flight_bytes"}


def test_stats(place, daemon, slab_reader, demo_model):
    reader = slab_reader.SlabReader(demo_model, "demo")
    for _ in range(2):
        reader.read(reader.layers[0], np.arange(4))
    first, second = (json.loads(place.run("streamd", "stats", "--json").stdout) for _ in range(2))
    assert {"model", "uptime_s", "io", "tiers", "clients"} <= first.keys()
    assert first["model"] == str(demo_model)
    assert first["io"].keys() >= IO_KEYS
    assert all(first["tiers"][tier].keys() >= TIER_KEYS for tier in ("host", "gpu"))
    host = first["tiers"]["host"]
    assert (host["hits"], host["misses"]) == (4, 4)
    assert host["bytes"] <= 6 << 20
    assert [client["hits"] for client in first["clients"]] == [4]
    # Cumulative, and since the last asking.
    assert first["since_last"]["hits"] == 4
    assert second["tiers"]["host"]["hits"] == 4
    assert second["since_last"]["hits"] == 0
    human = place.run("streamd", "stats").stdout
    assert re.search(r"demo  pid \d+  up [\d.]+s\n", human)
    assert "8 lookups, 50.0% hits" in human
    reader.close()


@pytest.mark.parametrize("attached", [False, True])
def test_no_orphan_is_left_by_a_client_that_is_killed(attached, place, demo_model):
    client = place.start("infer", "chat", "--model", demo_model, stdin=subprocess.PIPE)
    (daemon,) = place.wait_until(running_daemons, "an embedded daemon")
    if attached:
        place.wait_until(lambda: place.stats(daemon.name)["clients"], "the client attaches")
    client.kill()
    place.wait_until(lambda: not place.state_of(daemon.pid), "the daemon ends")
    assert place.leftovers() == []


@pytest.mark.parametrize("end", ["killed", "by itself"])
def test_an_embedded_daemon_outlives_its_owner_while_others_use_it(
    end, place, slab_reader, demo_model
):
    owner = place.start("infer", "chat", "--model", demo_model, stdin=subprocess.PIPE)
    (daemon,) = place.wait_until(running_daemons, "an embedded daemon")
    reader = slab_reader.SlabReader(demo_model, daemon.name)
    if end == "killed":
        owner.kill()
    else:
        owner.stdin.close()
    owner.wait()
    for layer in reader.layers:
        reader.read(layer, np.arange(4))
    assert reader.torn_count == 0
    assert place.state_of(daemon.pid)
    reader.close()
    place.wait_until(lambda: not place.state_of(daemon.pid), "the daemon ends with its last client")
    assert place.leftovers() == []
