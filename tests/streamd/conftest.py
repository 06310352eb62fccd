"""Benches of the cache and of the daemon's sockets."""

import os
import socket
import sys
import tempfile
from pathlib import Path

import pytest
from modules_beside import load_beside

from shared.runtime_dir import Endpoints
from streamd.control import Control

load_beside(__file__, "cache_bench", "cache_world", "prefetch_world", "control_bench")


@pytest.fixture
def bench():
    """Two clients fit: sections of 2 experts, 8 slots, 32 experts in two layers."""
    return sys.modules["cache_bench"].CacheBench()


@pytest.fixture
def floor():
    """Two clients fit: sections of 1 expert, 4 slots, 32 experts in two layers."""
    return sys.modules["cache_bench"].CacheBench(class_slots=(4,), waves=(1,))


@pytest.fixture
def daemon():
    """Nothing but the handler of `control`."""
    daemon = sys.modules["control_bench"].FakeDaemon()
    daemon.descriptor = os.eventfd(7)
    yield daemon
    os.close(daemon.descriptor)


@pytest.fixture
def endpoints():
    with tempfile.TemporaryDirectory(prefix="ct-") as directory:
        yield Endpoints(Path(directory), "test")


@pytest.fixture
def control(daemon, endpoints):
    control = Control(endpoints, daemon)
    yield control
    control.close()


@pytest.fixture
def connect(control, endpoints):
    """Makes a connection that has not attached."""
    made, patience_ms = [], sys.modules["control_bench"].PATIENCE_MS

    def connection():
        made.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        made[-1].settimeout(patience_ms / 1000)
        made[-1].connect(str(endpoints.unix_path))
        control.poll(patience_ms)
        return made[-1]

    yield connection
    for one in made:
        one.close()
