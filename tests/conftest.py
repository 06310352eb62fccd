"""Fixtures for all tests: the GGUF factory, the repository's model, the data shared beside it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PROJECT_DIR = Path(__file__).resolve().parents[1]


def _helper(name: str) -> ModuleType:
    """tests/<name>.py. Tests are no package here, so it cannot be imported by its name."""
    spec = importlib.util.spec_from_file_location(name, PROJECT_DIR / "tests" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def gguf_factory() -> ModuleType:
    """Small valid models to change and write: see tests/gguf_factory.py."""
    return _helper("gguf_factory")


@pytest.fixture(scope="session")
def gguf_bytes() -> ModuleType:
    """Files built or patched byte by byte: see tests/gguf_bytes.py."""
    return _helper("gguf_bytes")


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Oracles, models and traces beside the project; the test is skipped where they are absent."""
    path = PROJECT_DIR.parent / "shared"
    if not path.is_dir():
        pytest.skip("no ../shared beside the project")
    return path


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The trained model in the repository: hy_v3, 7 layers, 16 experts top-4, real tokenizer."""
    return PROJECT_DIR / "models" / "demo-hy3-iq2mix.gguf"
