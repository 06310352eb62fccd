"""One arm of tools/bench_stream.py: its settings, the same text, and what it took."""

import re
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from stream_oracle import Choice, Oracle, Recorder

from infer.blocks.moe import MoeFfn
from infer.commands.measure import BENCH_TEXT
from infer.config import LANE_OFF, LANE_ON, NO_PREFETCH, ModelConfig
from infer.engine import Engine
from infer.lane.compute_lane import LaneCounters
from infer.session import Session
from shared.daemon_options import CPU

ORACLE = "oracle"
# A setting of prefetch; with the compute lane, perhaps of so many threads.
ARM = re.compile(r"(?P<prefetch>\w+)(?P<lane>\+lane(?P<threads>[0-9]*))?")


@dataclass(frozen=True)
class ArmResult:
    """Of the measured tokens. _mb: 10^6 bytes a token; _ms: of a token, exposed_ms of a layer.

    lane_: what the CPU has computed of slabs, and how long it did, which compute_ms is without.
    The last fields need the machine's rates: see `judged`.
    """

    arm: str
    tokens: int
    tps: float
    wait_ms: float
    compute_ms: float
    hit_rate: float  # of the tier that is computed from
    host_hit_rate: float
    disk_mb: float
    useful_mb: float
    pcie_mb: float
    useful_pcie_mb: float
    moe_layers: int
    recall: float | None
    lane_mb: float = 0.0
    lane_ms: float = 0.0
    prefetch: dict[str, Any] = field(default_factory=dict)  # the client's and the daemon's counters
    lane: dict[str, Any] = field(default_factory=dict)  # what its policy has come to
    bound_tps: float = 0.0
    bound_by: str = ""
    ratio: float = 0.0
    exposed_ms: float = 0.0
    disk_busy: float = 0.0
    pcie_busy: float = 0.0
    compute_busy: float = 0.0

    def judged(self, disk_mb_s: float, pcie_mb_s: float | None) -> "ArmResult":
        """Against rates in 10^6 bytes a second."""
        bounds = {"compute": 1000 / self.compute_ms}
        if self.useful_mb > 0:
            bounds["disk"] = disk_mb_s / self.useful_mb
        if pcie_mb_s and self.lane_mb > 0:
            # What neither had to do could have been shared out between bus and CPU in any way.
            lane_mb_s = 1000 * self.lane_mb / self.lane_ms
            bounds["pcie+cpu"] = (pcie_mb_s + lane_mb_s) / (self.useful_pcie_mb + self.lane_mb)
        elif pcie_mb_s and self.useful_pcie_mb > 0:
            bounds["pcie"] = pcie_mb_s / self.useful_pcie_mb
        bound_by = min(bounds, key=lambda name: bounds[name])
        bound_tps = bounds[bound_by]
        return replace(
            self,
            bound_tps=bound_tps,
            bound_by=bound_by,
            ratio=self.tps / bound_tps,
            exposed_ms=1000 * (1 / self.tps - 1 / bound_tps) / self.moe_layers,
            disk_busy=self.disk_mb * self.tps / disk_mb_s,
            pcie_busy=self.pcie_mb * self.tps / pcie_mb_s if pcie_mb_s else 0.0,
            compute_busy=self.compute_ms * self.tps / 1000,
        )


class Arms:
    """Runs arms on one daemon, one client at a time; the first tells the oracle."""

    def __init__(self, config: ModelConfig, prompt: int, warmup: int, tokens: int) -> None:
        self._config = config
        self._counts = prompt, warmup, tokens
        self._choices: list[Choice] = []
        self.device = torch.device(CPU)

    def run(self, arm: str) -> ArmResult:
        prefetch, lane, threads = ARM.fullmatch(arm).group("prefetch", "lane", "threads")
        config = replace(
            self._config,
            prefetch=NO_PREFETCH if prefetch == ORACLE else prefetch,
            compute_lane=LANE_ON if lane else LANE_OFF,
            threads=int(threads or 0),
        )
        with Session(config) as session:
            self.device = session.engine.device
            return self._measure(arm, session)

    def _measure(self, arm: str, session: Session) -> ArmResult:
        engine = session.engine
        prompt_count, warmup_count, token_count = self._counts
        recorder = Recorder()
        if arm == ORACLE:
            engine.model.foresight = Oracle(self._choices, engine.client)
        elif engine.model.foresight is None and not self._choices:
            engine.model.foresight = recorder
        ids = session.tokenizer.encode(BENCH_TEXT)[:prompt_count]
        row = engine.extend(ids)
        for _ in range(warmup_count):
            row = engine.extend([int(row.argmax())])
        before, guessed_before = _reading(engine), _guesses(engine)
        for _ in range(token_count):
            row = engine.extend([int(row.argmax())])
        grown = {name: value - before[name] for name, value in _reading(engine).items()}
        self._choices = self._choices or recorder.choices
        return _result(arm, engine, token_count, grown, guessed_before)


def _guesses(engine: Engine) -> Any:
    return engine.prefetch.counters.copy() if engine.prefetch else None


def _reading(engine: Engine) -> dict[str, float]:
    """Everything that grows, at one moment."""
    stats = engine.client.stats()
    host, gpu = stats["tiers"]["host"], stats["tiers"]["gpu"]
    values: dict[str, float] = {
        "seconds": time.perf_counter(),
        "waited_s": engine.client.waits.waited_s,
        "read_bytes": stats["io"]["bytes_read"],
        "slab_bytes": stats["io"]["useful_bytes"],
        "uploaded_bytes": gpu["uploaded_bytes"],
    }
    counters = engine.lane.counters if engine.lane else LaneCounters()
    values |= {f"lane_{name}": value for name, value in asdict(counters).items()}
    for name, tier in (("host", host), ("gpu", gpu)):
        values |= {f"{name}_{key}": tier[key] for key in ("hits", "misses")}
        values[f"{name}_backfill_bytes"] = tier["backfill"]["bytes"]
        values |= {f"{name}_prefetch_{key}": count for key, count in tier["prefetch"].items()}
    return values


def _result(
    arm: str, engine: Engine, token_count: int, grown: dict[str, float], guessed_before: Any
) -> ArmResult:
    vain_bytes = grown["host_prefetch_wasted_bytes"] + grown["host_backfill_bytes"]
    vain_upload_bytes = grown["gpu_prefetch_wasted_bytes"] + grown["gpu_backfill_bytes"]
    tier = "gpu" if engine.device.type == "cuda" else "host"
    guesses = engine.prefetch.values(guessed_before) if engine.prefetch else {}
    daemons = {name: value for name, value in grown.items() if "prefetch" in name}
    layers = [layer for layer in engine.model.layers if isinstance(layer.ffn, MoeFfn)]
    lane_s = grown["lane_compute_s"]
    if tier == "gpu":  # what the CPU has computed the daemon was not asked for
        grown["gpu_misses"] += grown["lane_computed"]
    return ArmResult(
        arm=arm,
        tokens=token_count,
        tps=token_count / grown["seconds"],
        wait_ms=1000 * grown["waited_s"] / token_count,
        compute_ms=1000 * (grown["seconds"] - grown["waited_s"] - lane_s) / token_count,
        hit_rate=_share(grown[f"{tier}_hits"], grown[f"{tier}_misses"]),
        host_hit_rate=_share(grown["host_hits"], grown["host_misses"]),
        disk_mb=grown["read_bytes"] / token_count / 1e6,
        useful_mb=max(0.0, grown["slab_bytes"] - vain_bytes) / token_count / 1e6,
        pcie_mb=grown["uploaded_bytes"] / token_count / 1e6,
        useful_pcie_mb=max(0.0, grown["uploaded_bytes"] - vain_upload_bytes) / token_count / 1e6,
        moe_layers=len(layers),
        recall=guesses.get("recall"),
        lane_mb=grown["lane_computed_bytes"] / token_count / 1e6,
        lane_ms=1000 * lane_s / token_count,
        lane=engine.lane.values() if engine.lane else {},
        prefetch={**guesses, **{name: value for name, value in daemons.items() if value}},
    )


def _share(hits: float, misses: float) -> float:
    return hits / (hits + misses) if hits + misses else 0.0
