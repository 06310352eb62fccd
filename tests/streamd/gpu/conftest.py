"""The bench of both tiers, made importable by hand: tests are no package here."""

import gc
import importlib.util
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

for _name in ("fake_gpu", "gpu_bench", "gpu_daemon"):  # in the order in which they need each other
    _spec = importlib.util.spec_from_file_location(_name, Path(__file__).with_name(f"{_name}.py"))
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])


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
