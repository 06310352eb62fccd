"""The bench of both tiers, and sockets of our own."""

import gc
import sys
from contextlib import ExitStack

import pytest
from modules_beside import load_beside

load_beside(__file__, "fake_gpu", "gpu_bench", "gpu_daemon")


@pytest.fixture(autouse=True)
def _nothing_mapped_afterwards():
    """Mappings hold descriptors, and go with what is left of a daemon: now, not in another test."""
    yield
    gc.collect()


@pytest.fixture
def make_bench():
    with ExitStack() as stack:
        yield lambda host_slots=48, gpu_slots=8: sys.modules["gpu_bench"].GpuBench(
            host_slots, gpu_slots, stack
        )


@pytest.fixture
def bench(make_bench):
    """Two clients fit on the GPU: 8 slots, sections of 2 of 128 experts; 48 host slots."""
    return make_bench()


@pytest.fixture
def place(tmp_path_factory, monkeypatch):
    """Sockets of our own; the paths of sockets may not be long."""
    directory = tmp_path_factory.mktemp("run", numbered=True)
    directory.chmod(0o700)
    monkeypatch.setenv("STREAMD_RUNTIME_DIR", str(directory))
    monkeypatch.setattr("infer.daemon.connection.map_gpu_tier", sys.modules["gpu_daemon"].map_fake)
