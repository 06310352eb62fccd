"""Prompts on one daemon, for tools/bench_prefill.py: how long they take, and what is read."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from infer.commands.prompt_reads import PromptReads, PromptWatch
from infer.config import ModelConfig
from infer.daemon.daemon_process import EmbeddedDaemon
from infer.engine import Engine
from infer.session import Session
from shared.daemon_options import DaemonOptions
from shared.errors import ConfigError
from shared.runtime_dir import running_daemons

WARM_UP_SEED = 0  # a prompt's is its length


@dataclass(frozen=True)
class PromptResult:
    """Of `count` prompts of `tokens` tokens, means. _mb: 10^6 bytes for a token.

    reads_per_expert, uploads_per_expert: for each expert that a chunk touched. The last fields need
    the machine's rates and the time without any reads: see `judged`.
    """

    tokens: int
    count: int
    chunk: int
    tps: float
    seconds: float
    experts: int
    absent: int
    reads_per_expert: float
    uploads_per_expert: float
    disk_mb: float
    pcie_mb: float
    compute_tps: float | None = None
    bound_tps: float = 0.0
    bound_by: str = ""
    ratio: float = 0.0

    def judged(
        self, disk_mb_s: float, pcie_mb_s: float | None, compute_tps: float | None
    ) -> "PromptResult":
        """Against rates in 10^6 bytes a second; compute_tps: tokens a second, all in place."""
        bounds: dict[str, float] = {}
        if compute_tps is not None:
            bounds["compute"] = compute_tps
        if self.disk_mb > 0:
            bounds["disk"] = disk_mb_s / self.disk_mb
        if pcie_mb_s and self.pcie_mb > 0:
            bounds["pcie"] = pcie_mb_s / self.pcie_mb
        if not bounds:
            return self
        bound_by = min(bounds, key=lambda name: bounds[name])
        return replace(
            self,
            compute_tps=compute_tps,
            bound_tps=bounds[bound_by],
            bound_by=bound_by,
            ratio=self.tps / bounds[bound_by],
        )


class Prompts:
    """Random tokens, the same for every daemon; `count` of each length."""

    def __init__(self, lengths: Sequence[int], count: int) -> None:
        self.lengths, self.count = lengths, count

    def of(self, length: int, vocab_size: int) -> Iterator[list[int]]:
        rng = np.random.default_rng(length)
        for _ in range(self.count):
            yield rng.integers(0, vocab_size, length).tolist()

    def measure(self, engine: Engine, in_place: bool) -> list[PromptResult]:
        """in_place: each prompt is computed a second time, and only that counts."""
        self._warm_up(engine)
        return [self._measure(engine, length, in_place) for length in self.lengths]

    def _warm_up(self, engine: Engine) -> None:
        """Kernels are compiled at their first use, which depends on how many tokens a chunk has.

        Not by the prompts themselves: their experts would be there.
        """
        rng = np.random.default_rng(WARM_UP_SEED)
        for length in sorted({min(length, engine.chunk) for length in self.lengths}):
            _timed(engine, rng.integers(0, engine.shape.vocab_size, length).tolist())

    def _measure(self, engine: Engine, length: int, in_place: bool) -> PromptResult:
        runs = []
        for ids in self.of(length, engine.shape.vocab_size):
            if in_place:
                _timed(engine, ids)
            runs.append(_timed(engine, ids))
        seconds = sum(run[0] for run in runs) / len(runs)
        reads = PromptReads.together([run[1] for run in runs])
        tokens = length * len(runs)
        return PromptResult(
            tokens=length,
            count=len(runs),
            chunk=min(length, engine.chunk),
            tps=length / seconds,
            seconds=seconds,
            experts=reads.experts // len(runs),
            absent=reads.absent // len(runs),
            reads_per_expert=reads.reads_per_expert,
            uploads_per_expert=reads.uploads_per_expert,
            disk_mb=reads.read_bytes / tokens / 1e6,
            pcie_mb=reads.uploaded_bytes / tokens / 1e6,
        )


def _timed(engine: Engine, ids: list[int]) -> tuple[float, PromptReads]:
    engine.kv.truncate(0)
    watch = PromptWatch(engine)
    started_s = time.perf_counter()
    engine.extend(ids)
    return time.perf_counter() - started_s, watch.reads(len(ids))


def plan_of(model: Path, options: DaemonOptions) -> dict[str, Any]:
    """What `streamd plan` says; in a process of its own, since it opens the GPU."""
    words = [sys.executable, "-m", "streamd", "plan", "--json", "--model", str(model)]
    words += options.arguments()
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        cause, _, remedy = done.stderr.removeprefix("streamd: ").partition("\n")
        raise ConfigError(cause, remedy.strip())
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


@contextmanager
def session_on(
    model: Path, options: DaemonOptions, name: str, exact: bool = False
) -> Iterator[tuple[Session, int]]:
    """A session on a daemon of its own, and that daemon's process."""
    daemon = EmbeddedDaemon(model, options, name)
    try:
        daemon.wait_ready()
        pid = next(record.pid for record in running_daemons() if record.name == name)
        config = ModelConfig(
            model=model,
            name=name,
            device=options.device,
            ctx=options.ctx,
            chunk=options.chunk,
            exact=exact,
        )
        with Session(config) as session:
            yield session, pid
    finally:
        daemon.close()


def peak_rss_bytes(pid: int) -> int:
    """Of a process so far; what it shares counts in each that has touched it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0
