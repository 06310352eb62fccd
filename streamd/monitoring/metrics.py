"""`--metrics HOST:PORT`: the statistics for Prometheus, names and units by its conventions.

A thread serves HTTP, one request at a time, and asks the daemon through its socket as any other
program does: it holds no lock and no data of the main loop's. A daemon that does not answer (it
loads, or hangs) is told as `streamd_serving 0`.
"""

import socket
import threading
from collections.abc import Iterator
from socketserver import TCPServer
from types import TracebackType
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from shared.errors import ConfigError, StreamError
from shared.threads import start_thread
from streamd.address import Address
from streamd.ask import ask_stats
from streamd.scheduling.prefetch import PREFETCH_OUTCOMES

# Less than Prometheus' usual 10 s for a scrape.
ANSWER_DEADLINE_MS = 4000
# A client that connects and says nothing holds up the next one this long at the most.
REQUEST_DEADLINE_S = 5.0


class MetricsServer:
    """Use as a context manager; ConfigError where the address cannot be had."""

    def __init__(self, address: Address, daemon_name: str) -> None:
        registry = CollectorRegistry()
        registry.register(DaemonCollector(daemon_name))
        ProcessCollector(registry=registry)
        try:
            server = _Server6 if ":" in address.host else _Server
            self._server = server((address.host, address.port), _Handler)
            self._server.set_app(make_wsgi_app(registry))
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics at {address}: {error.strerror}",
                "give --metrics an address of this machine and a port that is free",
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )

    @property
    def address(self) -> Address:
        """Where it listens, the port chosen."""
        host, port = self._server.socket.getsockname()[:2]
        return Address(host, port)

    def __enter__(self) -> "MetricsServer":
        start_thread(self._thread)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(WSGIServer):
    def server_bind(self) -> None:
        """Without asking the name service who we are, which may take its time."""
        TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = self.server_address[1]
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_DEADLINE_S

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a scrape every few seconds is no news."""


class DaemonCollector(Collector):
    """Asks once a scrape, so that all counters are of one moment."""

    def __init__(self, daemon_name: str) -> None:
        self._name = daemon_name

    def describe(self) -> list[Metric]:
        """Nothing: registering must not ask a daemon that does not serve yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        serving = GaugeMetricFamily("streamd_serving", "1 if the daemon answers, 0 if not")
        try:
            values = ask_stats(self._name, watching=True, deadline_ms=ANSWER_DEADLINE_MS)
        except StreamError:
            serving.add_metric([], 0)
            yield serving
            return
        serving.add_metric([], 1)
        yield serving
        yield from metrics_of(values)


def metrics_of(values: dict[str, Any]) -> Iterator[Metric]:
    """The families of one answer to `stats`, without what asks for it."""
    info = InfoMetricFamily("streamd_model", "The model that is served, and how it is read")
    io = values["io"]
    info.add_metric([], {"name": values["name"], "model": values["model"], "engine": io["engine"]})
    yield info
    yield _gauge("streamd_uptime_seconds", "Since the model was loaded", values["uptime_s"])
    yield _gauge("streamd_fault", "1 if the model file is another one now", bool(values["fault"]))
    yield _gauge("streamd_clients", "Attached clients", len(values["clients"]))
    yield _counter("streamd_tokens", "Tokens that clients have computed", values["tokens"])
    yield _counter("streamd_revocations", "Clients that held others up", values["revocations"])
    yield _gauge("streamd_resident_bytes", "Tensors that are not experts", values["resident_bytes"])
    yield _gauge(
        "streamd_memory_available_bytes",
        "What the machine or the control group has left",
        values["memory"]["available_bytes"],
    )
    yield from _tier_families(values["tiers"])
    yield from _disk_families(io)
    yield from _prefetch_families(values["tiers"])


def _tier_families(tiers: dict[str, dict[str, Any]]) -> Iterator[Metric]:
    lookups = CounterMetricFamily(
        "streamd_expert_lookups", "Experts that clients looked up", labels=["tier", "result"]
    )
    evictions = CounterMetricFamily("streamd_evictions", "Slabs evicted", labels=["tier"])
    slots, used = (
        GaugeMetricFamily(name, text, labels=["tier", "slab_bytes"])
        for name, text in (
            ("streamd_slots", "Slots for expert slabs"),
            ("streamd_slots_used", "Slots that hold a slab, or are about to"),
        )
    )
    size = GaugeMetricFamily("streamd_cache_bytes", "Memory of the slots", labels=["tier"])
    for name, tier in tiers.items():
        if not tier["slots"]:
            continue
        lookups.add_metric([name, "hit"], tier["hits"])
        lookups.add_metric([name, "miss"], tier["misses"])
        evictions.add_metric([name], tier["evictions"])
        size.add_metric([name], tier["bytes"])
        for part in tier["classes"]:
            slots.add_metric([name, str(part["slab_bytes"])], part["slots"])
            used.add_metric([name, str(part["slab_bytes"])], part["slots_used"])
    yield from (lookups, evictions, slots, used, size)
    gpu = tiers["gpu"]
    yield _counter("streamd_uploads", "Slabs copied to the GPU", gpu["uploads"])
    yield _counter("streamd_uploaded_bytes", "Bytes copied to the GPU", gpu["uploaded_bytes"])


def _prefetch_families(tiers: dict[str, dict[str, Any]]) -> Iterator[Metric]:
    experts, size = (
        CounterMetricFamily(name, text, labels=["tier", "outcome"])
        for name, text in (
            ("streamd_prefetched_experts", "Experts brought before anybody asked for them"),
            ("streamd_prefetched_bytes", "Bytes of their slabs"),
        )
    )
    idle = CounterMetricFamily(
        "streamd_backfilled_bytes", "Slabs read while nothing was wanted", labels=["tier"]
    )
    for name, tier in tiers.items():
        if not tier["slots"]:
            continue
        for outcome in PREFETCH_OUTCOMES:
            experts.add_metric([name, outcome], tier["prefetch"][outcome])
            size.add_metric([name, outcome], tier["prefetch"][f"{outcome}_bytes"])
        idle.add_metric([name], tier["backfill"]["bytes"])
    yield from (experts, size, idle)


def _disk_families(io: dict[str, Any]) -> Iterator[Metric]:
    yield _counter("streamd_disk_read_bytes", "Read, widened to whole blocks", io["bytes_read"])
    yield _counter("streamd_disk_useful_bytes", "Of slabs that arrived", io["useful_bytes"])
    yield _counter("streamd_disk_reads", "Reads ended", io["reads"])
    yield _counter("streamd_disk_retries", "Reads repeated", io["retries"])
    yield _counter("streamd_failed_slabs", "Slabs that could not be read", io["failed_slabs"])
    yield _gauge("streamd_disk_in_flight_bytes", "Asked of the disk now", io["in_flight_bytes"])
    yield _gauge("streamd_disk_in_flight_reads", "Asked of the disk now", io["in_flight_reads"])
    yield _gauge("streamd_disk_waiting_reads", "Not asked of it yet", io["waiting_reads"])
    for share in ("p50", "p99"):
        latency_s = io[f"latency_ms_{share}"] / 1000
        yield _gauge(f"streamd_disk_read_latency_{share}_seconds", "One read, of late", latency_s)


def _counter(name: str, text: str, value: float) -> Metric:
    """`_total` is added to the name."""
    family = CounterMetricFamily(name, text)
    family.add_metric([], value)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family
