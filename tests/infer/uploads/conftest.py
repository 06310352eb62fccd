"""The fake device, and sockets of our own."""

import gc

import pytest
from modules_beside import load_beside

load_beside(__file__, "fake_upload_device", "uploading_bench")


@pytest.fixture(autouse=True)
def _nothing_mapped_afterwards():
    """Mappings hold descriptors, and go with what is left of a daemon: now, not in another test."""
    yield
    gc.collect()


@pytest.fixture
def place(tmp_path_factory, monkeypatch):
    """Sockets of our own; the paths of sockets may not be long."""
    directory = tmp_path_factory.mktemp("run", numbered=True)
    directory.chmod(0o700)
    monkeypatch.setenv("STREAMD_RUNTIME_DIR", str(directory))
