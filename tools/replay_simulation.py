"""One cache, one trace, one policy: hits and misses as a daemon would see them."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from replay_policies import Belady, DaemonLfu, Lru, Policy, S3Fifo, Slru, WTinyLfu
from replay_traces import Group, Trace

from shared.errors import ConfigError
from shared.policy import HALF_LIFE_ROUNDS

POLICIES = ("lru", "lfu", "lfu-ageing", "slru", "s3-fifo", "w-tinylfu", "belady")


@dataclass
class Result:
    lookups: int = 0
    hits: int = 0
    decode_lookups: int = 0
    decode_hits: int = 0
    read_bytes: int = 0

    def add(self, other: "Result") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def hit_pct(self) -> float:
        return 100 * self.hits / max(1, self.lookups)

    @property
    def decode_hit_pct(self) -> float:
        return 100 * self.decode_hits / max(1, self.decode_lookups)


def make_policy(
    name: str, trace: Trace, capacity_count: int, half_life_rounds: float = HALF_LIFE_ROUNDS
) -> Policy:
    key_count = trace.n_layers * trace.n_experts
    makers: dict[str, Callable[[], Policy]] = {
        "lru": Lru,
        "lfu": lambda: DaemonLfu(key_count, 0),
        "lfu-ageing": lambda: DaemonLfu(key_count, half_life_rounds),
        "slru": lambda: Slru(capacity_count),
        "s3-fifo": lambda: S3Fifo(capacity_count),
        "w-tinylfu": lambda: WTinyLfu(capacity_count),
        "belady": lambda: Belady(_future(trace)),
    }
    if name not in makers:
        raise ConfigError(f"unknown policy {name!r}", f"choose of {', '.join(POLICIES)}")
    return makers[name]()


def simulate_by_layer(
    trace: Trace, capacity_bytes: int, name: str, half_life_rounds: float, warm_up: float = 0.0
) -> Result:
    """As `simulate`, with a cache for each layer: each has the same share of its experts."""
    total = Result()
    share = capacity_bytes / int(trace.key_bytes.sum())
    slot_count = max(1, int(trace.n_experts * share))
    for layer, layer_bytes in trace.by_layer():
        # Rounds are of all experts, and each layer sees its share of the lookups.
        policy = make_policy(name, layer, slot_count, half_life_rounds / trace.n_layers)
        total.add(simulate(layer, int(layer_bytes * share), policy, warm_up))
    return total


def simulate(trace: Trace, capacity_bytes: int, policy: Policy, warm_up: float = 0.0) -> Result:
    """Hits and reads. warm_up: the share of the groups, from the first on, that is not counted.

    Misses are always admitted; the group being served is never evicted. A group larger than the
    whole cache keeps what fits, its last misses.
    """
    result = Result()
    first = int(len(trace.groups) * warm_up)
    served = zip(trace.groups, _misses(trace, capacity_bytes, policy), strict=True)
    for (is_decode, keys), missed in islice(served, first, None):
        hit_count = len(keys) - len(missed)
        result.lookups += len(keys)
        result.hits += hit_count
        if is_decode:
            result.decode_lookups += len(keys)
            result.decode_hits += hit_count
        result.read_bytes += sum(int(trace.key_bytes[key]) for key in missed)
    return result


def misses_of(trace: Trace, slot_count: int, policy: Policy) -> Iterator[Group]:
    """For each group what of it a cache of so many slots lacks, whatever their sizes."""
    same = replace(trace, key_bytes=np.ones_like(trace.key_bytes))
    for (is_decode, _), missed in zip(trace.groups, _misses(same, slot_count, policy), strict=True):
        yield is_decode, missed


def _misses(trace: Trace, capacity_bytes: int, policy: Policy) -> Iterator[tuple[int, ...]]:
    inside: dict[int, None] = {}
    used_bytes = 0
    for _, keys in trace.groups:
        protected = set(keys)
        missed = tuple(key for key in keys if key not in inside)
        for key in keys:
            if key not in inside:  # or no more: a group may be larger than the cache
                size_bytes = int(trace.key_bytes[key])
                while used_bytes + size_bytes > capacity_bytes and inside:
                    outside = protected.difference(inside)
                    all_of_group = len(inside) == len(protected) - len(outside)
                    guarded = outside if all_of_group else protected
                    gone = policy.victim(guarded)
                    del inside[gone]
                    used_bytes -= int(trace.key_bytes[gone])
                inside[key] = None
                used_bytes += size_bytes
            policy.look_up(key)
        yield missed


def _future(trace: Trace) -> dict[int, deque[int]]:
    """For each key the numbers of the lookups that ask for it."""
    future: dict[int, deque[int]] = {}
    number = 0
    for _, keys in trace.groups:
        for key in keys:
            future.setdefault(key, deque()).append(number)
            number += 1
    return future
