"""The cache's bench. Tests are no package here, so its modules are made importable by hand."""

import importlib.util
import sys
from pathlib import Path

import pytest

# In the order in which they need each other.
for _name in ("cache_bench", "cache_world", "prefetch_world"):
    _spec = importlib.util.spec_from_file_location(_name, Path(__file__).with_name(f"{_name}.py"))
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])


@pytest.fixture
def bench():
    """Two clients fit: sections of 2 experts, 8 slots, 32 experts in two layers."""
    return sys.modules["cache_bench"].CacheBench()


@pytest.fixture
def floor():
    """Two clients fit: sections of 1 expert, 4 slots, 32 experts in two layers."""
    return sys.modules["cache_bench"].CacheBench(class_slots=(4,), waves=(1,))
