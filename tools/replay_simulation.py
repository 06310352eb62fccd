"""One cache, one trace, one policy: hits and misses as a daemon would see them."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from replay_policies import Belady, DaemonLfu, Lru, Policy, S3Fifo, Slru, WTinyLfu
from replay_traces import Trace

from streamd.policy import HALF_LIFE_ROUNDS

POLICIES = ("lru", "lfu", "lfu-ageing", "slru", "s3-fifo", "w-tinylfu", "belady")


@dataclass
class Result:
    lookups: int = 0
    hits: int = 0
    decode_lookups: int = 0
    decode_hits: int = 0
    read_bytes: int = 0

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
        raise SystemExit(f"unknown policy {name!r}: choose of {', '.join(POLICIES)}")
    return makers[name]()


def simulate(trace: Trace, capacity_bytes: int, policy: Policy) -> Result:
    """Misses are always admitted; the group being served is never evicted.

    A group larger than the whole cache keeps what fits, its last misses.
    """
    result = Result()
    inside: dict[int, None] = {}
    used_bytes = 0
    for is_decode, keys in trace.groups:
        protected = set(keys)
        hits = [key in inside for key in keys]
        result.lookups += len(keys)
        result.hits += sum(hits)
        if is_decode:
            result.decode_lookups += len(keys)
            result.decode_hits += sum(hits)
        for key, hit in zip(keys, hits, strict=True):
            if not hit:
                size_bytes = int(trace.key_bytes[key])
                result.read_bytes += size_bytes
                while used_bytes + size_bytes > capacity_bytes and inside:
                    outside = protected.difference(inside)
                    guarded = protected if len(inside.keys() - protected) else outside
                    gone = policy.victim(guarded)
                    del inside[gone]
                    used_bytes -= int(trace.key_bytes[gone])
                inside[key] = None
                used_bytes += size_bytes
            policy.look_up(key)
    return result


def _future(trace: Trace) -> dict[int, deque[int]]:
    """For each key the numbers of the lookups that ask for it."""
    future: dict[int, deque[int]] = {}
    number = 0
    for _, keys in trace.groups:
        for key in keys:
            future.setdefault(key, deque()).append(number)
            number += 1
    return future
