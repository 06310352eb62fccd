"""What the daemon tells about itself: cumulative values, and the difference to the last asking."""

from typing import Any

from streamd.cache import HostCache
from streamd.readers.reader import Reader
from streamd.sessions import Sessions

NO_GPU_TIER = {
    "hits": 0, "misses": 0, "evictions": 0, "slots": 0, "slots_used": 0, "bytes": 0,
}  # fmt: skip


def host_tier_values(cache: HostCache, arena_bytes: int) -> dict[str, int]:
    clients = cache.clients.values()
    counters = cache.counters
    return {
        "hits": counters.departed_hits + sum(client.area.hits for client in clients),
        "misses": counters.misses,
        "evictions": counters.evictions,
        "joined_reads": counters.joined_reads,
        "slots": sum(slots.count for slots in cache.classes),
        "slots_used": sum(slots.used_count for slots in cache.classes),
        "bytes": arena_bytes,
    }


def io_values(reader: Reader) -> dict[str, Any]:
    stats = reader.stats()
    return {
        "engine": stats.engine,
        "bytes_read": stats.bytes_read,
        "useful_bytes": stats.useful_bytes,
        "reads": stats.reads,
        "retries": stats.retries,
        "failed_slabs": stats.failed_slabs,
        "latency_ms_p50": round(stats.latency_ms_p50, 3),
        "latency_ms_p99": round(stats.latency_ms_p99, 3),
        "in_flight_bytes": stats.in_flight_bytes,
        "in_flight_limit_bytes": stats.limit_bytes,
        "waiting_reads": stats.waiting_reads,
    }


def client_values(cache: HostCache, sessions: Sessions) -> list[dict[str, int]]:
    return [
        {
            "client": client.number,
            "pid": sessions.of_number(client.number).pid,
            "hits": client.area.hits,
            "misses": client.area.misses,
            "fetches": client.area.fetches,
            "tokens": client.area.tokens,
        }
        for client in cache.clients.values()
    ]


class SinceLast:
    """The growth of a few counters between two askings."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def take(self, now: dict[str, float]) -> dict[str, float]:
        since = {name: value - self._before.get(name, 0) for name, value in now.items()}
        self._before = dict(now)
        return since
