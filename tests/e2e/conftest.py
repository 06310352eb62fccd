"""Programs started as a user starts them, in a place of their own.

A place is a socket directory and a state directory that nobody else uses. What a test started is
ended with it, and a place that does not end empty is an error.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from modules_beside import load_beside

import infer.cli
from shared.runtime_dir import running_daemons
from shared.wire import Stats, StatsRequest
from streamd.ask import ask

HERE = Path(__file__).resolve().parent
PROJECT_DIR = HERE.parents[1]
DEMO_MODEL = PROJECT_DIR / "models" / "demo-hy3-iq2mix.gguf"
TINY_MODEL = PROJECT_DIR.parent / "shared" / "models" / "tiny-hy3-iq2mix.gguf"
# Generous: the processors may be shared with anything.
DEADLINE_S = 90.0
POLL_S = 0.02
MAX_MESSAGE_CHARS = 500


@dataclass(frozen=True)
class Daemon:
    name: str
    process: subprocess.Popen[str]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        end(self.process)


class Place:
    """Where programs run: STREAMD_RUNTIME_DIR and XDG_STATE_HOME, also of this process."""

    def __init__(self) -> None:
        # Directly in the temporary directory: the paths of sockets may not be long.
        self.directory = Path(tempfile.mkdtemp(prefix="e2e-"))
        self.runtime_dir = self.directory / "run"
        self.state_dir = self.directory / "state"
        self.runtime_dir.mkdir(mode=0o700)
        self.environment = {
            "STREAMD_RUNTIME_DIR": str(self.runtime_dir),
            "XDG_STATE_HOME": str(self.state_dir),
        }
        self._processes: list[subprocess.Popen[str]] = []

    # Starting programs

    def start(self, program: str, *words: object, **options: Any) -> subprocess.Popen[str]:
        """`streamd`, `infer` or a script of this directory, with pipes for what it says."""
        if program.endswith(".py"):
            command = [sys.executable, str(HERE / program)]
        else:
            command = [str(Path(sysconfig.get_path("scripts"), program))]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(
            [*command, *map(str, words)],
            **(pipes | {"text": True, "start_new_session": True} | options),
            env={**os.environ, **self.environment},
        )
        self._processes.append(process)
        return process

    def run(
        self, program: str, *words: object, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """A program that ends by itself."""
        process = self.start(program, *words, stdin=subprocess.PIPE)
        out, err = process.communicate(stdin, DEADLINE_S)
        return subprocess.CompletedProcess([program, *words], process.returncode, out, err)

    def start_daemon(self, model: Path, *options: object, program: str = "streamd") -> Daemon:
        """A daemon that has its name; it may be loading its model yet."""
        log = self.directory / f"{len(self._processes)}.log"
        with log.open("w") as output:
            process = self.start(
                program, "serve", "--model", model, *options, stdout=output, stderr=output
            )

        def names() -> list[str]:
            return [record.name for record in running_daemons() if record.pid == process.pid]

        self.wait_until(lambda: names() or process.poll() is not None, "the daemon has its name")
        assert process.poll() is None, log.read_text()
        return Daemon(names()[0], process, log)

    def daemon(self, model: Path, *options: object, program: str = "streamd") -> Daemon:
        """A daemon that serves `model`."""
        daemon = self.start_daemon(model, *options, program=program)
        self.wait_until(
            lambda: "serving" in daemon.log.read_text() or daemon.process.poll() is not None,
            "the daemon serves",
        )
        assert daemon.process.poll() is None, daemon.log.read_text()
        return daemon

    # Looking

    def plan(self, model: Path) -> dict[str, Any]:
        done = self.run("streamd", "plan", "--json", "--model", model)
        assert done.returncode == 0, done.stderr
        values: dict[str, Any] = json.loads(done.stdout)
        return values

    def stats(self, name: str) -> dict[str, Any]:
        answer = ask(name, StatsRequest())
        assert isinstance(answer, Stats)
        return answer.values

    def leftovers(self) -> list[str]:
        """What lies in the socket directory."""
        return sorted(path.name for path in self.runtime_dir.iterdir())

    @staticmethod
    def wait_until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
        """The first true value of `condition()`."""
        end_s = time.monotonic() + deadline_s
        while not (value := condition()):
            assert time.monotonic() < end_s, f"{what}: not within {deadline_s:g} s"
            time.sleep(POLL_S)
        return value

    @staticmethod
    def state_of(pid: int) -> str:
        """The letter by which the kernel calls a process's state; "" if it has ended."""
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return ""
        return status.rpartition(")")[2].split()[0].replace("Z", "")

    # Ending

    def close(self) -> None:
        """End what was started here. AssertionError if a process or a file outlives that."""
        for process in self._processes:
            end(process)
        try:
            # Embedded daemons are not ours; they end because their clients have.
            self.wait_until(lambda: not running_daemons(), "embedded daemons end")
            assert self.leftovers() == []
        finally:
            for record in running_daemons():
                os.kill(record.pid, signal.SIGKILL)
            shutil.rmtree(self.directory)


def end(process: subprocess.Popen[str]) -> None:
    """Let a process end: asked first, made to then."""
    if process.poll() is None:
        process.terminate()
        process.send_signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(DEADLINE_S / 3)
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(BrokenPipeError):  # unwritten words to a program that has ended
                pipe.close()


@contextmanager
def _place() -> Iterator[Place]:
    place = Place()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in place.environment.items():
            patch.setenv(name, value)
        try:
            yield place
        finally:
            place.close()


@pytest.fixture
def place() -> Iterator[Place]:
    with _place() as place:
        yield place


@pytest.fixture(scope="module")
def module_place() -> Iterator[Place]:
    """One for all tests of a module; a module uses either this or `place`."""
    with _place() as place:
        yield place


@pytest.fixture
def refusal(place, capfd, monkeypatch) -> Callable[..., str]:
    """Runs a command that must fail and leave nothing behind; its message.

    `infer` runs in this process, which imports torch but once; it prints and returns the same.
    """

    def run(program: str, *words: object) -> str:
        before = set(os.listdir("/dev/shm")), place.leftovers()
        if program == "infer":
            monkeypatch.setattr(sys, "argv", [program, *map(str, words)])
            code = infer.cli.main()
            out, err = capfd.readouterr()
        else:
            done = place.run(program, *words)
            code, out, err = done.returncode, done.stdout, done.stderr
        assert (code, out) == (1, ""), err
        assert re.fullmatch(rf"{program}: .+\n  .+\n", err), "cause and remedy, a line each"
        assert len(err) <= MAX_MESSAGE_CHARS
        assert set(os.listdir("/dev/shm")) <= before[0]
        assert place.leftovers() == before[1]
        return err

    return run


@pytest.fixture(scope="session")
def streaming_model() -> Path:
    """The model with the most experts there is: tiny-hy3 beside the project, or the demo."""
    return TINY_MODEL if TINY_MODEL.exists() else DEMO_MODEL


@pytest.fixture(scope="session")
def slab_reader() -> ModuleType:
    """A client without a model, which compares slabs with the file: slab_reader.py here."""
    return load_beside(__file__, "slab_reader")[0]


@pytest.fixture
def open_terminal(module_place, monkeypatch) -> Iterator[Callable[..., Any]]:
    """Opens a terminal (terminal.py here) with `infer chat` and these words in it."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")  # nobody here answers where the cursor is
    opened: list[Any] = []

    def open_one(*words: object) -> Any:
        opened.append(load_beside(__file__, "terminal")[0].Terminal(module_place, *words))
        opened[-1].greeting = opened[-1].read_until(r"Type a message, or /help\.(?=\n)")
        return opened[-1]

    yield open_one
    for terminal in opened:
        terminal.close()
