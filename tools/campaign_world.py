"""What the campaign disturbs: a daemon, clients that live through it all, and how they are."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared.gguf_index import GgufIndex
from shared.wire import Stats, StatsRequest
from streamd.ask import ask

HERE = Path(__file__).resolve().parent
NAME = "campaign"
STALL_DEADLINE_MS = 300
# Longer than anything may take on a busy machine: two deadlines of a client after one another.
DEADLINE_S = 100.0
POLL_S = 0.02
SOUND = "0 0 0"


class Broken(AssertionError):
    """What the campaign looks for."""


class Client:
    """A process of campaign_client.py; `tell` a line, `hear` one of JSON."""

    def __init__(self, world: "World", *words: object) -> None:
        kind, *more = map(str, words)
        command = [sys.executable, str(HERE / "campaign_client.py"), kind, str(world.model), NAME]
        self.errors = world.new_log()
        world.clients.append(self)
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*command, *more],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=world.environment,
                text=True,
            )

    def tell(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def hear(self, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        ready, _, _ = select.select([self.process.stdout], [], [], deadline_s)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            what = "says nothing" if not ready else "has ended"
            raise Broken(f"a client {what}: {self.errors.read_text()[-2000:]}")
        values: dict[str, Any] = json.loads(line)
        return values

    def ask(self) -> dict[str, Any]:
        self.tell()
        return self.hear()

    def end(self) -> None:
        """May be called again."""
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class World:
    """Use as a context manager, which ends whatever runs in it.

    `environment` is for its programs; STREAMD_RUNTIME_DIR of this process is set as well.
    """

    def __init__(self, model: Path, seed: int) -> None:
        self.model = model.absolute()
        self.seed = seed
        self.directory = Path(tempfile.mkdtemp(prefix="campaign-"))
        self.runtime_dir = self.directory / "run"
        self.runtime_dir.mkdir(mode=0o700)
        self.drive = self.directory / "drive"
        self.environment = os.environ | {
            "STREAMD_RUNTIME_DIR": str(self.runtime_dir),
            "XDG_STATE_HOME": str(self.directory / "state"),
            "CAMPAIGN_DRIVE": str(self.drive),
            "CAMPAIGN_SEED": str(seed),
            "PYTHONPATH": str(HERE.parent),
        }
        os.environ["STREAMD_RUNTIME_DIR"] = str(self.runtime_dir)
        self.set_drive(SOUND)
        self.index = GgufIndex.open(self.model)
        self._log_count = 0
        self._daemon: subprocess.Popen[bytes] | None = None
        self.clients: list[Client] = []
        self.host_cache = self._plan() * 2 // 3  # room for some clients, and much to evict

    def __enter__(self) -> "World":
        self.start_daemon()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Broken if the daemon does not end when told, or leaves anything behind."""
        try:
            for client in self.clients:
                client.end()
            self.daemon.send_signal(signal.SIGCONT)
            self.daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.daemon.wait(DEADLINE_S)
            left = sorted(path.name for path in self.runtime_dir.iterdir())
            if kind is None and (left or self.daemon.returncode):
                raise Broken(f"SIGTERM: exit code {self.daemon.returncode}, left behind: {left}")
        finally:
            self.daemon.kill()
            self.daemon.wait()
            shutil.rmtree(self.directory)

    def new_log(self) -> Path:
        self._log_count += 1
        return self.directory / f"{self._log_count}.log"

    def _plan(self) -> int:
        command = [sys.executable, "-m", "streamd", "plan", "--json", "--model", str(self.model)]
        done = subprocess.run(command, env=self.environment, capture_output=True, check=True)
        return int(json.loads(done.stdout)["full_bytes"])

    def set_drive(self, faults: str) -> None:
        self.drive.write_text(faults)

    # The daemon

    @property
    def daemon(self) -> subprocess.Popen[bytes]:
        assert self._daemon is not None
        return self._daemon

    def start_daemon(self) -> None:
        self.log = self.new_log()
        words = ("serve", "--model", self.model, "--name", NAME, "--io", "pread", "--device", "cpu")
        options = ("--host-cache", self.host_cache, "--stall-deadline-ms", STALL_DEADLINE_MS)
        command = [sys.executable, HERE / "campaign_daemon.py", *words, *options]
        with self.log.open("w") as log:
            self._daemon = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=self.environment,
            )
        self.wait_until(lambda: "serving" in self.log.read_text(), "the daemon serves")

    def restart_daemon(self, number: signal.Signals) -> None:
        self.daemon.send_signal(number)
        self.daemon.wait(DEADLINE_S)
        if number == signal.SIGTERM and self.daemon.returncode != 0:
            raise Broken(f"SIGTERM ended the daemon with {self.daemon.returncode}")
        self.check_log()
        self.start_daemon()

    def stats(self) -> dict[str, Any]:
        """After a look at every cache; see campaign_daemon.py."""
        answer = ask(NAME, StatsRequest(), deadline_ms=int(1000 * DEADLINE_S))
        assert isinstance(answer, Stats)
        return answer.values

    def check_log(self) -> None:
        text = self.log.read_text()
        if "Traceback" in text or "Assertion" in text:
            raise Broken(f"the daemon's log: {text[-3000:]}")

    def wait_until(self, condition: Callable[[], Any], what: str) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not condition():
            if self.daemon.poll() is not None:
                raise Broken(f"the daemon has ended: {self.log.read_text()[-3000:]}")
            if time.monotonic() > end_s:
                raise Broken(f"{what}: not within {DEADLINE_S:g} s")
            time.sleep(POLL_S)


def descriptor_count(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory_mb(pid: int) -> float:
    """Private memory in use; what is shared is the arena, which does not grow."""
    status = Path(f"/proc/{pid}/status").read_text()
    lines = dict(line.split(":", 1) for line in status.splitlines())
    return int(lines["RssAnon"].split()[0]) / 1024


def memfd_count(pid: int) -> int:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if "/memfd:" in line})
