"""What the daemon tells about itself: cumulative values, and the difference to the last asking."""

from typing import Any

from streamd.cache import HostCache
from streamd.gpu_tier import GpuTier
from streamd.readers.reader import Reader
from streamd.served_model import ServedModel
from streamd.sessions import Sessions

NO_GPU_TIER = {
    "hits": 0, "misses": 0, "evictions": 0, "joined_reads": 0,
    "slots": 0, "slots_used": 0, "bytes": 0, "uploads": 0, "uploaded_bytes": 0,
}  # fmt: skip


def model_values(
    model: ServedModel, sessions: Sessions, since_last: "SinceLast", uptime_s: float
) -> dict[str, Any]:
    """Tiers, disk and clients; what has grown since the last asking counts as asked for now."""
    host = tier_values(model.cache, model.plan.layout.total_bytes)
    io = io_values(model.reader)
    caches = [tier.cache for tier in model.tiers.values()]
    growing = {
        "seconds": uptime_s,
        **{name: host[name] for name in ("hits", "misses", "evictions")},
        **{name: io[name] for name in ("bytes_read", "reads")},
    }
    return {
        "io": io,
        "tiers": {"host": host, "gpu": gpu_tier_values(model.gpu)},
        "resident_bytes": model.resident_region.size_bytes,
        "clients": [values for cache in caches for values in client_values(cache, sessions)],
        "pages": {
            "slots": model.tier.region.page_kind,
            "resident": model.resident_region.page_kind,
        },
        "revocations": sum(cache.counters.revocations for cache in caches),
        "since_last": since_last.take(growing),
    }


# Clients write some of the counters: whatever they say, it must go on the wire.
MAX_COUNT = 2**62


def gpu_tier_values(gpu: GpuTier | None) -> dict[str, int | str]:
    if gpu is None:
        return {**NO_GPU_TIER}
    return {
        **tier_values(gpu.cache, gpu.arena.size_bytes),
        "uploads": gpu.uploads.upload_count,
        "uploaded_bytes": gpu.uploads.uploaded_bytes,
        "resident_bytes": gpu.resident.size_bytes,
        "device": gpu.device.name,
    }


def tier_values(cache: HostCache, arena_bytes: int) -> dict[str, int]:
    clients = cache.clients.values()
    counters = cache.counters
    return {
        "hits": min(
            counters.departed_hits + sum(client.area.hits for client in clients), MAX_COUNT
        ),
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
    """The clients of one tier; the daemon's own are none."""
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
        if not client.ours
    ]


class SinceLast:
    """The growth of a few counters between two askings."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def take(self, now: dict[str, float]) -> dict[str, float]:
        since = {name: value - self._before.get(name, 0) for name, value in now.items()}
        self._before = dict(now)
        return since
