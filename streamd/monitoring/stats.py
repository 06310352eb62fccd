"""What the daemon tells about itself: cumulative values, and the difference to the last asking.

Whoever wants rates takes the difference of two answers: `streamd stats --watch`, Prometheus.
"""

import mmap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import RequestError
from shared.free_memory import available_memory_bytes
from shared.residency import NOT_RESIDENT
from shared.wire import IN_GPU, IN_HOST, MAX_HEAT_CELLS, Heat
from streamd.readers.reader import Reader
from streamd.scheduling.backfill import NO_BACKFILL
from streamd.scheduling.prefetch import PrefetchCounters
from streamd.served_model import ServedModel
from streamd.sessions import Sessions
from streamd.slot_cache.cache import HostCache
from streamd.tiers.gpu_tier import GpuTier

NO_GPU_TIER: dict[str, int | str] = {
    "hits": 0, "misses": 0, "evictions": 0, "joined_reads": 0,
    "slots": 0, "slots_used": 0, "bytes": 0, "uploads": 0, "uploaded_bytes": 0,
    "resident_bytes": 0, "streamed_layers": 0, "streamed_bytes": 0, "device": "",
}  # fmt: skip


def model_values(
    model: ServedModel,
    sessions: Sessions,
    since_last: "SinceLast",
    uptime_s: float,
    watching: bool,
) -> dict[str, Any]:
    """Tiers, disk and clients; what has grown since the last asking counts as asked for now.

    Not for one that is watching: it takes its own differences.
    """
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
        "tiers": {
            name: values | part_values(model, name)
            for name, values in (("host", host), ("gpu", gpu_tier_values(model.gpu)))
        },
        "experts_per_layer": model.experts.n_experts,
        "resident_bytes": model.resident_bytes,
        "clients": [values for cache in caches for values in client_values(cache, sessions)],
        "pages": {
            "slots": model.tier.region.page_kind,
            "resident": model.resident_region.page_kind,
        },
        "tokens": min(sum(token_count(cache) for cache in caches), MAX_COUNT),
        "memory": {"rss_bytes": rss_bytes(), "available_bytes": available_memory_bytes()},
        "revocations": sum(cache.counters.revocations for cache in caches),
        "since_last": since_last.peek(growing) if watching else since_last.take(growing),
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
        "streamed_layers": len(gpu.plan.streamed.layers),
        "streamed_bytes": gpu.plan.streamed.streamed_bytes,
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


def part_values(model: ServedModel, tier: str) -> dict[str, Any]:
    """A tier's slots by size class, what each layer has of it, and what nobody has waited for.

    Nothing and zeros without that tier.
    """
    offered = model.tiers.get(tier)
    if offered is None:
        nothing: dict[str, Any] = {"classes": [], "layer_residents": [], "layer_misses": []}
        return nothing | {"prefetch": asdict(PrefetchCounters()), "backfill": NO_BACKFILL}
    cache = offered.cache
    residents = np.count_nonzero(cache.plane != NOT_RESIDENT, axis=1)
    classes = zip(model.experts.classes, cache.classes, strict=True)
    return {
        "prefetch": asdict(offered.scheduler.prefetch.counters),
        "backfill": offered.scheduler.backfill.values(),
        "classes": [
            {"slab_bytes": c.slab_bytes, "slots": slots.count, "slots_used": slots.used_count}
            for c, slots in classes
        ],
        "layer_residents": residents.tolist(),
        "layer_misses": [cache.counters.layer_misses[n] for n in range(model.experts.n_layers)],
    }


def heat_values(model: ServedModel) -> Heat:
    """Raises RequestError for a model that a message has no room for."""
    n_layers, n_experts = model.experts.n_layers, model.experts.n_experts
    if n_layers * n_experts > MAX_HEAT_CELLS:
        raise RequestError(f"{n_layers} layers of {n_experts} experts are too many for a picture")
    heat = np.zeros(n_layers * n_experts, np.float32)
    for tier in model.tiers.values():
        tier.cache.heat.refresh()
        heat += tier.cache.heat.policy.heat
    in_host = (model.table.host_slots != NOT_RESIDENT) * np.uint8(IN_HOST)
    in_gpu = (model.table.gpu_slots != NOT_RESIDENT) * np.uint8(IN_GPU)
    dense = np.flatnonzero(model.experts.layer_class < 0).tolist()
    return Heat(n_layers, n_experts, dense, heat.tobytes(), (in_host | in_gpu).tobytes())


def token_count(cache: HostCache) -> int:
    """Of all clients, those that have left too."""
    present = sum(client.area.tokens for client in cache.clients.values())
    return cache.counters.departed_tokens + present


def rss_bytes(statm: Path = Path("/proc/self/statm")) -> int:
    """What of the daemon's memory is there: its slots that have been used, too."""
    return int(statm.read_text().split()[1]) * mmap.PAGESIZE


def io_values(reader: Reader) -> dict[str, Any]:
    stats = reader.stats()
    return {
        "engine": stats.engine,
        "bytes_read": stats.bytes_read,
        "useful_bytes": stats.useful_bytes,
        "reads": stats.reads,
        "retries": stats.retries,
        "slabs": stats.slabs,
        "failed_slabs": stats.failed_slabs,
        "latency_ms_p50": round(stats.latency_ms_p50, 3),
        "latency_ms_p99": round(stats.latency_ms_p99, 3),
        "in_flight_bytes": stats.in_flight_bytes,
        "in_flight_reads": stats.in_flight_reads,
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
            **dict(zip(("own_hits", "own_misses"), client.area.own_lookups, strict=True)),
        }
        for client in cache.clients.values()
        if not client.ours
    ]


class SinceLast:
    """The growth of a few counters between two askings."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def peek(self, now: dict[str, float]) -> dict[str, float]:
        return {name: round(value - self._before.get(name, 0), 3) for name, value in now.items()}

    def take(self, now: dict[str, float]) -> dict[str, float]:
        """As `peek`, and the next growth counts from here."""
        since = self.peek(now)
        self._before = dict(now)
        return since
