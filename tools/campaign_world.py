"""What the campaign disturbs and the soak watches: a daemon, its clients, and how they are."""

import argparse
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from device_memory import used_mib

from shared import daemon_options
from shared.arena import round_up
from shared.daemon_options import CPU
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
FAULTY_DRIVE = (str(HERE / "campaign_daemon.py"),)
# Room for some clients, and much to evict.
CACHE_SHARE = 2 / 3
# A GPU's memory comes in such pieces.
GRANULE_BYTES = 2 << 20


class Broken(AssertionError):
    """What the campaign looks for."""


class Client:
    """A process of campaign_client.py, or another `script`; `tell` a line, `hear` one of JSON."""

    def __init__(self, world: "World", *words: object, script: str = "campaign_client.py") -> None:
        kind, *more = map(str, words)
        command = [sys.executable, str(HERE / script), kind, str(world.model), NAME, world.device]
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

    program: the daemon, as words for Python; io: its engine. device: cpu, or cuda:N for a tier on
    that GPU, which clients then compute from. cache_share: of the model's experts, those that a
    tier's slots hold at once.
    `environment` is for its programs; STREAMD_RUNTIME_DIR of this process is set as well.
    """

    def __init__(
        self,
        model: Path,
        seed: int = 0,
        program: Sequence[str] = FAULTY_DRIVE,
        io: str = "pread",
        device: str = CPU,
        cache_share: float = CACHE_SHARE,
    ) -> None:
        self.model = model.absolute()
        self.index = GgufIndex.open(self.model)  # first: what is no model leaves no directory
        self.device = device
        self._program = program
        self._io = io
        self._cache_share = cache_share
        self.directory = Path(tempfile.mkdtemp(prefix="campaign-"))
        self.runtime_dir = self.directory / "run"
        self.runtime_dir.mkdir(mode=0o700)
        self.drive = self.directory / "drive"
        self.environment = os.environ | {
            "STREAMD_RUNTIME_DIR": str(self.runtime_dir),
            "XDG_STATE_HOME": str(self.directory / "state"),
            "CAMPAIGN_DRIVE": str(self.drive),
            "CAMPAIGN_SEED": str(seed),
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])
            ),
        }
        os.environ["STREAMD_RUNTIME_DIR"] = str(self.runtime_dir)
        self.set_drive(SOUND)
        self._log_count = 0
        self._daemon: subprocess.Popen[bytes] | None = None
        self.clients: list[Client] = []

    def __enter__(self) -> "World":
        try:
            self._limits = cache_limits(self._plan(), self._cache_share)
            self.start_daemon()
        except BaseException:
            self._clear()
            raise
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
            self._clear()

    def _clear(self) -> None:
        if self._daemon is not None:
            self._daemon.kill()
            self._daemon.wait()
        shutil.rmtree(self.directory)

    def new_log(self) -> Path:
        self._log_count += 1
        return self.directory / f"{self._log_count}.log"

    def _plan(self) -> dict[str, Any]:
        words = ("plan", "--json", "--model", str(self.model), "--device", self.device)
        done = subprocess.run(
            [sys.executable, "-m", "streamd", *words],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Broken(done.stderr.strip())
        plan: dict[str, Any] = json.loads(done.stdout)
        return plan

    def set_drive(self, faults: str) -> None:
        self.drive.write_text(faults)

    # The daemon

    @property
    def daemon(self) -> subprocess.Popen[bytes]:
        assert self._daemon is not None
        return self._daemon

    def start_daemon(self) -> None:
        self.log = self.new_log()
        words = ("serve", "--model", self.model, "--name", NAME, "--device", self.device)
        more = ("--io", self._io, "--stall-deadline-ms", STALL_DEADLINE_MS)
        command = [sys.executable, *self._program, *words, *more, *self._limits]
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


def cache_limits(plan: dict[str, Any], share: float) -> list[object]:
    """Options for slots that hold that share of the experts, in each tier that there is; not less
    than it needs. plan: what `streamd plan --json` says."""
    words: list[object] = []
    for tier, option in ((plan, "--host-cache"), (plan["gpu"], "--gpu-cache")):
        if tier is not None:
            size_bytes = max(tier["floor_bytes"], int(tier["full_bytes"] * share))
            words += [option, round_up(size_bytes, GRANULE_BYTES)]
    return words


def parse_device(text: str) -> str:
    """For argparse: cpu or cuda:N; cuda is the first one."""
    device = daemon_options.parse_device(f"{text}:0" if text == "cuda" else text)
    if device == "auto":
        raise argparse.ArgumentTypeError("say which: cpu or cuda")
    return device


def used_vram_mib(device: str) -> int:
    """Of a whole GPU, cuda:N, by the driver's own word."""
    mib = used_mib(int(device.partition(":")[2]))
    if mib is None:
        raise Broken(f"nvidia-smi does not tell about {device}")
    return mib


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
