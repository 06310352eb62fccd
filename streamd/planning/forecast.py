"""How often slots will be hit, and how fast a model can answer then.

Hit rates come from a table of replays of real routing, or from a replay of the model's own trace:

    hit_curves.csv   made by tools/replay_curves.py from traces of two models, Qwen3-30B-A3B (top-6
                     of 128 experts) and gpt-oss-20b (top-4 of 32); a model is taken to be like the
                     one whose top-k is nearest to its own as a share of its experts

Tokens a second are at most what the slowest of the parts allows, since all work at the same time.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from itertools import pairwise

from shared.errors import ConfigError
from streamd.records.trace_replay import ReplayedTier, RoutingTrace, miss_shares

# Of a trace; the caches fill meanwhile.
WARM_UP = 0.5
MIN_TOKENS = 16


@dataclass(frozen=True)
class Misses:
    """Shares of all expert lookups of decoding: `gpu` (1 where there is no such tier), `host`."""

    gpu: float
    host: float
    source: str


class HitCurve:
    """One trace's rows of the table: misses by the shares of experts that have slots."""

    def __init__(self, name: str, top_k_share: float) -> None:
        self.name = name
        self.top_k_share = top_k_share
        self._misses: dict[tuple[float, float], tuple[float, float]] = {}

    def add(self, gpu_share: float, host_share: float, gpu_miss: float, host_miss: float) -> None:
        self._misses[gpu_share, host_share] = (gpu_miss, host_miss)

    @cached_property
    def _gpu_shares(self) -> list[float]:
        return sorted({gpu for gpu, _ in self._misses})

    @cached_property
    def _host_shares(self) -> list[float]:
        return sorted({host for _, host in self._misses})

    def misses(self, gpu_share: float, host_share: float) -> Misses:
        """Between the rows linearly; a tier for all experts misses none, one for none all."""
        gpu = 1.0 if gpu_share <= 0 else self._between(gpu_share, self._gpu_row)
        host = self._between(
            host_share,
            {0.0: gpu, 1.0: 0.0}
            | {share: self._host_at(gpu_share, share) for share in self._host_shares},
        )
        return Misses(gpu, min(gpu, host), self.name)

    @cached_property
    def _gpu_row(self) -> dict[float, float]:
        any_host = self._host_shares[0]
        measured = {share: self._misses[share, any_host][0] for share in self._gpu_shares}
        return {0.0: 1.0} | measured | {1.0: 0.0}

    def _host_at(self, gpu_share: float, host_share: float) -> float:
        row = {gpu: self._misses[gpu, host_share][1] for gpu in self._gpu_shares}
        return self._between(gpu_share, row | {1.0: 0.0})

    @staticmethod
    def _between(at: float, row: Mapping[float, float]) -> float:
        points = sorted(row)
        at = min(max(at, points[0]), points[-1])
        for low, high in pairwise(points):
            if at <= high:
                weight = (at - low) / (high - low)
                return row[low] * (1 - weight) + row[high] * weight
        return row[points[-1]]


def load_curves() -> list[HitCurve]:
    """The table that belongs to the package."""
    curves: dict[str, HitCurve] = {}
    with files("streamd.planning").joinpath("hit_curves.csv").open() as file:
        for row in csv.DictReader(file):
            name = row["trace"]
            curve = curves.setdefault(name, HitCurve(name, float(row["top_k_share"])))
            names = ("gpu_share", "host_share", "gpu_miss", "host_miss")
            curve.add(*(float(row[column]) for column in names))
    return list(curves.values())


def curve_like(top_k_share: float) -> HitCurve:
    """The curve of the trace whose routers choose the most similar share of their experts."""
    return min(load_curves(), key=lambda c: abs(math.log(c.top_k_share / top_k_share)))


@dataclass(frozen=True)
class Budget:
    """Slots of each size class that a client's lookups can find something in.

    gpu: None where there is no such tier. layer_class: each layer's class, -1 for dense ones.
    """

    layer_class: Sequence[int]
    n_experts: int
    top_k: int
    host: Sequence[int]
    gpu: Sequence[int] | None = None

    @property
    def layer_counts(self) -> list[int]:
        """Layers of each class."""
        return [list(self.layer_class).count(number) for number in range(len(self.host))]


def misses_by_table(budget: Budget) -> Misses:
    """By the curve of the trace whose routers choose the most similar share of their experts."""
    curve = curve_like(budget.top_k / budget.n_experts)
    layers = budget.layer_counts
    gpu_counts = budget.gpu or [0] * len(layers)
    found = [
        curve.misses(gpu / (count * budget.n_experts), host / (count * budget.n_experts))
        for count, gpu, host in zip(layers, gpu_counts, budget.host, strict=True)
    ]
    weights = [count / sum(layers) for count in layers]
    return Misses(
        sum(w * misses.gpu for w, misses in zip(weights, found, strict=True)),
        sum(w * misses.host for w, misses in zip(weights, found, strict=True)),
        curve.name,
    )


def misses_of_trace(trace: RoutingTrace, budget: Budget, name: str) -> Misses:
    """By a replay of the trace; ConfigError for one of another model, or one that is too short to
    say anything."""
    n_layers = len(budget.layer_class)
    if (trace.n_layers, trace.n_experts) != (n_layers, budget.n_experts):
        raise ConfigError(
            f"{name} is of a model with {trace.n_layers} layers of {trace.n_experts} experts, not"
            f" {n_layers} of {budget.n_experts}",
            "give a trace of this model, or leave --trace out",
        )
    groups = trace.groups
    if len(groups) < MIN_TOKENS * sum(budget.layer_counts):
        raise ConfigError(
            f"{name} holds less than {MIN_TOKENS} tokens of an answer", "record some hundred"
        )
    slot_counts = [counts for counts in (budget.gpu, budget.host) if counts is not None]
    tiers = [ReplayedTier(counts, budget.layer_class, budget.n_experts) for counts in slot_counts]
    found = miss_shares(groups, tiers, int(WARM_UP * len(groups)))
    return Misses(found[0] if budget.gpu is not None else 1.0, found[-1], name)


@dataclass(frozen=True)
class Rates:
    """Of a machine, bytes a second; None: not known, and left out of the bound.

    memory: of the memory that the computing device reads weights from.
    """

    disk: float | None = None
    pcie: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class Bound:
    """What decoding moves for a token, bytes, and the tokens a second that each part allows."""

    disk_bytes: float
    pcie_bytes: float
    compute_bytes: float
    tokens_per_s: Mapping[str, float]

    @property
    def limit(self) -> str:
        """The part that allows the fewest tokens a second; "" where none is known."""
        return min(self.tokens_per_s, key=lambda part: self.tokens_per_s[part], default="")


def bound_of(
    misses: Misses,
    token_bytes: float,
    resident_bytes: float,
    rates: Rates,
    on_gpu: bool,
    streamed_bytes: float = 0.0,
) -> Bound:
    """token_bytes: of all experts that a token needs; resident_bytes: of the tensors it reads, of
    which streamed_bytes are copied to the GPU each time."""
    disk_bytes = misses.host * token_bytes
    pcie_bytes = misses.gpu * token_bytes + streamed_bytes if on_gpu else 0.0
    compute_bytes = token_bytes + resident_bytes
    moved: Sequence[tuple[str, float, float | None]] = (
        ("disk", disk_bytes, rates.disk),
        ("pcie", pcie_bytes, rates.pcie),
        ("compute", compute_bytes, rates.memory),
    )
    allowed = {name: rate / size for name, size, rate in moved if rate and size > 0}
    return Bound(disk_bytes, pcie_bytes, compute_bytes, allowed)
