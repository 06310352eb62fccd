"""What goes over a client's connection, where one of both sides does not behave."""

import os
import signal
import socket
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from shared.errors import DaemonLost, ProtocolMismatch, ReadFailed, RequestError
from shared.gguf_index import GgufIndex
from shared.runtime_dir import Endpoints
from shared.wire import (
    HOST_TIER,
    MAX_HINT_EXPERTS,
    MAX_MESSAGE_BYTES,
    Attach,
    Attached,
    Fetch,
    Hint,
    decode,
    encode,
)

# A read takes milliseconds here; what waits for a deadline takes half a minute or more.
SOON_S = 5.0
FLOOD_S = 2.0
EXPERTS = np.arange(4)


@pytest.fixture
def failing_drive(place, tmp_path, monkeypatch) -> Path:
    """While it exists, the drive of this place's daemons fails."""
    sign = tmp_path / "the drive fails"
    monkeypatch.setitem(place.environment, "DRIVE_FAILS", str(sign))
    return sign


def descriptor_count(place, pid: int) -> int:
    """Once it is the same twice in a row: ZeroMQ takes a moment for a connection."""

    def counted() -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    def settled() -> int:
        before = counted()
        time.sleep(0.1)
        return before if counted() == before else 0

    return place.wait_until(settled, "its descriptors are counted")


@contextmanager
def raw_connection(model: Path, name: str):
    """An attached connection and its ticket; nothing that comes over it is read."""
    shards = [list(shard) for shard in GgufIndex.open(model).fingerprints]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(Endpoints.find(name).unix_path))
        connection.send(encode(Attach(os.getpid(), shards, HOST_TIER)))
        frame, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 8)
        for fd in descriptors:
            os.close(fd)
        attached = decode(frame)
        assert isinstance(attached, Attached)
        yield connection, attached.ticket


def test_a_first_fetch_that_fails_is_told_at_once(place, failing_drive, slab_reader, demo_model):
    daemon = place.daemon(
        demo_model, "--warm", "off", "--io", "pread", program="daemon_with_failing_drive.py"
    )
    failing_drive.touch()
    with closing(slab_reader.SlabReader(demo_model, daemon.name)) as reader:
        for _ in range(20):  # what of a section's failures is left over does not pile up
            started_s = time.monotonic()
            with pytest.raises(ReadFailed):
                reader.read(reader.layers[0], EXPERTS)
            assert time.monotonic() - started_s < SOON_S
        failing_drive.unlink()
        for _ in EXPERTS:  # a section may join a read that had failed by then, one at a time
            with suppress(ReadFailed):
                reader.read(reader.layers[0], EXPERTS)
        reader.read(reader.layers[0], EXPERTS)
        assert reader.slab_count >= len(EXPERTS)
        assert reader.torn_count == 0
    daemon.stop()


def test_a_first_fetch_of_what_there_is_not_is_refused(place, slab_reader, demo_model):
    daemon = place.daemon(demo_model, "--warm", "off")
    with closing(slab_reader.SlabReader(demo_model, daemon.name)) as reader:
        client = reader.client
        ticket, layer = client.mapping.attached.ticket, reader.layers[0]
        client._connection.fetch(Fetch(ticket, 1, layer, [reader.experts.n_experts]))
        with pytest.raises(RequestError, match="an expert beyond"):
            client._connection.next_message(time.monotonic() + SOON_S)
        reader.read(layer, EXPERTS)
        assert reader.torn_count == 0
    daemon.stop()


def test_who_is_hung_up_on_hears_why(place, slab_reader, demo_model):
    """The connection and the doorbell end behind the words: they are read first."""
    daemon = place.daemon(demo_model, "--warm", "off")
    with closing(slab_reader.SlabReader(demo_model, daemon.name)) as reader:
        client = reader.client
        client._connection.fetch(Fetch(client.mapping.attached.ticket + 1, 1, 1, [0]))
        place.wait_until(lambda: not place.stats(daemon.name)["clients"], "it is hung up on")
        with pytest.raises(ProtocolMismatch, match="hints of its own"):
            client._connection.next_message(time.monotonic() + SOON_S)
    daemon.stop()


def test_a_hint_of_too_many_experts_ends_nothing(place, slab_reader, demo_model):
    daemon = place.daemon(demo_model, "--warm", "off")
    with closing(slab_reader.SlabReader(demo_model, daemon.name)) as reader:
        reader.client.hint(reader.layers[0], np.zeros(MAX_HINT_EXPERTS + 1, int), 1)
        reader.read(reader.layers[0], EXPERTS)
        assert reader.torn_count == 0
    daemon.stop()


def test_a_flood_over_one_connection_leaves_another_client_served(place, slab_reader, demo_model):
    daemon = place.daemon(demo_model, "--warm", "off")
    reader = slab_reader.SlabReader(demo_model, daemon.name)
    open_before = descriptor_count(place, daemon.pid)
    end_s = time.monotonic() + FLOOD_S
    with closing(reader), raw_connection(demo_model, daemon.name) as (flood, ticket):
        experts = list(range(reader.experts.n_experts))
        frames = [
            encode(Fetch(ticket, 1, 0, [0])),  # refused: the first layer has no experts
            encode(Hint(ticket, 1 << 40, reader.layers[-1], experts[:64], 64)),
        ]
        sent_count = 0

        def pour() -> None:
            nonlocal sent_count
            flood.settimeout(SOON_S)
            while time.monotonic() < end_s:
                flood.send(frames[sent_count % len(frames)])
                sent_count += 1

        pouring = threading.Thread(target=pour)
        pouring.start()
        longest_s, rng = 0.0, np.random.default_rng(1)
        while time.monotonic() < end_s:
            started_s = time.monotonic()
            chosen = rng.choice(len(experts), 4, replace=False)
            reader.read(int(rng.choice(reader.layers)), chosen)
            longest_s = max(longest_s, time.monotonic() - started_s)
        pouring.join(SOON_S)
        assert sent_count > 1000
        assert longest_s < 1.0
        assert reader.torn_count == 0
        assert daemon.log.read_text().count("does not read what it is told") == 1
        flood.close()
        place.wait_until(lambda: len(place.stats(daemon.name)["clients"]) == 1, "it has gone")
        assert descriptor_count(place, daemon.pid) == open_before
    daemon.stop()


def test_a_daemon_that_is_stopped_holds_up_no_hint(place, slab_reader, demo_model):
    daemon = place.daemon(demo_model, "--warm", "off")
    with closing(slab_reader.SlabReader(demo_model, daemon.name)) as reader:
        layer = reader.layers[0]
        os.kill(daemon.pid, signal.SIGSTOP)
        place.wait_until(lambda: place.state_of(daemon.pid) == "T", "it is stopped")
        started_s = time.monotonic()
        for _ in range(1000):
            reader.client.hint(layer, EXPERTS, 1)
        assert time.monotonic() - started_s < SOON_S
        threading.Timer(0.5, os.kill, (daemon.pid, signal.SIGCONT)).start()
        reader.read(layer, EXPERTS)  # behind all those hints
        assert (reader.slab_count, reader.torn_count) == (len(EXPERTS), 0)
    daemon.stop()


def test_a_fetch_that_a_stopped_daemon_has_no_room_for_gives_up(
    place, slab_reader, demo_model, monkeypatch
):
    monkeypatch.setattr("infer.daemon.connection.SEND_DEADLINE_S", 1)
    daemon = place.daemon(demo_model, "--warm", "off")
    with closing(slab_reader.SlabReader(demo_model, daemon.name)) as reader:
        os.kill(daemon.pid, signal.SIGSTOP)
        place.wait_until(lambda: place.state_of(daemon.pid) == "T", "it is stopped")
        for _ in range(1000):
            reader.client.hint(reader.layers[0], EXPERTS, 1)
        started_s = time.monotonic()
        with pytest.raises(DaemonLost, match="it takes no requests"):
            reader.read(reader.layers[0], EXPERTS)
        assert 0.5 < time.monotonic() - started_s < SOON_S
        os.kill(daemon.pid, signal.SIGCONT)
    daemon.stop()
