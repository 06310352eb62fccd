"""The fake device, made importable by hand: tests are no package here."""

import gc
import importlib.util
import sys
from pathlib import Path

import pytest

for _name in ("fake_upload_device", "uploading_bench"):
    _spec = importlib.util.spec_from_file_location(_name, Path(__file__).with_name(f"{_name}.py"))
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])


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
