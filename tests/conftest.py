"""Fixtures for all tests: the GGUF factory, the repository's model, the data shared beside it."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import gguf_factory as factory
import pytest
from hypothesis import settings
from modules_beside import load_beside

# The machine may be busy with anything; pytest's own time limit is enough.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# A script's background jobs, and all they start, have Ctrl-C ignored, and under nohup a hang-up
# too: here both are tested. A handler of ours is none for the programs that we start.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

PROJECT_DIR = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def _state_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What daemons keep for later starts stays out of the user's home."""
    path = tmp_path_factory.mktemp("state")
    os.environ["XDG_STATE_HOME"] = str(path)
    return path


@pytest.fixture(autouse=True)
def _nothing_known_hot(_state_home: Path) -> None:
    """No test's daemon starts warm from another one's."""
    for hot_list in _state_home.glob("streamd/hot-*.npz"):
        hot_list.unlink()


@pytest.fixture(scope="session")
def gguf_factory() -> ModuleType:
    """Small valid models to change and write: see tools/gguf_factory.py."""
    return factory


@pytest.fixture(scope="session")
def gguf_bytes() -> ModuleType:
    """Files built or patched byte by byte: see tests/gguf_bytes.py."""
    return load_beside(__file__, "gguf_bytes")[0]


@pytest.fixture(scope="session")
def in_child() -> Callable[[Callable[[], object]], str]:
    """Does something in a process of its own, whose limits may be lowered; what came of it.

    That is `str` of what the action returns, or "Class: message" of what it raises.
    """

    def run(action: Callable[[], object]) -> str:
        out, into = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                said = str(action())
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(into, said.encode())
            os._exit(0)
        os.close(into)
        with os.fdopen(out) as told:
            said = told.read()
        os.waitpid(pid, 0)
        return said

    return run


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
