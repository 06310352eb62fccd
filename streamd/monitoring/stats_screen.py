"""The live view of `streamd stats --watch` on a terminal, drawn with rich.

From the top: who and for how long; the tiers' hit rates over 1 s, 60 s and all time, evictions and
slots; disk and PCIe, the queue, memory; what was read ahead, if hinted; what each layer holds and
misses; clients and their tokens a second; slots by size of slab.
"""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shared.sizes import size_text
from shared.stats_view import duration
from streamd.monitoring.stats_history import WINDOWS_S, History
from streamd.monitoring.stats_line import percent
from streamd.scheduling.prefetch import PREFETCH_OUTCOMES

LEVELS = "·▁▂▃▄▅▆▇█"
WINDOWS: tuple[float | None, ...] = (*WINDOWS_S, None)
MAX_CLIENT_ROWS = 16


class Screen:
    """A terminal's other screen, until the end. NO_COLOR and TERM are rich's business."""

    def __init__(self, console: Console | None = None) -> None:
        self._live = Live(console=console or Console(), screen=True, auto_refresh=False)

    def __enter__(self) -> "Screen":
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, history: History) -> None:
        self._live.update(draw(history), refresh=True)


def draw(history: History) -> RenderableType:
    now = history.now
    head = Text(f"{now['name']}  up {duration(now['uptime_s'])}  {now['model']}", style="bold")
    parts: list[RenderableType] = [head]
    if now["fault"]:
        parts.append(Text(now["fault"], style="bold red"))
    parts += [_tiers(history), _traffic(history)]
    if any(tier["prefetch"]["hinted"] for _, tier in _shown_tiers(history)):
        parts.append(_prefetch(history))
    parts += [*_layers(history), _clients(history), _classes(history)]
    return Group(*parts)


def sparkline(values: Sequence[float], top: float | None = None) -> str:
    """A character a value; `top` (default: the largest) is a full block, anything above 0 shows."""
    top = max(values, default=0) if top is None else top
    if top <= 0:
        return LEVELS[0] * len(values)
    steps = len(LEVELS) - 1
    return "".join(LEVELS[min(steps, -int(-value * steps // top))] for value in values)


def _shown_tiers(history: History) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, tier in history.now["tiers"].items():
        if tier["slots"]:
            yield name, tier


def _tiers(history: History) -> Table:
    table = _table("tier", "hits 1 s", "60 s", "all", "evicted/s", "all", "slots", "bytes")
    for name, tier in _shown_tiers(history):
        table.add_row(
            name,
            *(percent(history.hit_share(name, window_s)) for window_s in WINDOWS),
            f"{history.rate(f'tiers.{name}.evictions', WINDOWS_S[0]):,.0f}",
            f"{tier['evictions']:,}",
            f"{tier['slots_used']}/{tier['slots']}",
            size_text(tier["bytes"]),
        )
    return table


def _traffic(history: History) -> Table:
    """Rates over the last second and minute, then what is there at this moment."""
    table = _table("traffic", "1 s", "60 s", "now")
    io, memory = history.now["io"], history.now["memory"]
    rows = [
        ("disk", "io.bytes_read", f"{io['engine']}: p50 {io['latency_ms_p50']:g} ms,"
         f" p99 {io['latency_ms_p99']:g} ms"),
    ]  # fmt: skip
    if history.now["tiers"]["gpu"]["slots"]:
        rows.append(("PCIe", "tiers.gpu.uploaded_bytes", "host to GPU"))
    for name, path, now in rows:
        rates = (f"{history.rate(path, window_s) / 1e6:,.1f} MB/s" for window_s in WINDOWS_S)
        table.add_row(name, *rates, now)
    queue = (
        f"{io['in_flight_reads']} reads in flight,"
        f" {io['waiting_reads']} waiting, {size_text(io['in_flight_bytes'])}"
    )
    reads = (f"{history.rate('io.reads', window_s):,.0f}/s" for window_s in WINDOWS_S)
    table.add_row("queue", *reads, queue)
    table.add_row(
        "memory", "", "",
        f"{size_text(memory['rss_bytes'])} taken,"
        f" {size_text(memory['available_bytes'])} available",
    )  # fmt: skip
    return table


def _classes(history: History) -> Table:
    """Slots by size of slab."""
    table = _table("slabs of", "tier", "slots used")
    for name, tier in _shown_tiers(history):
        for part in tier["classes"]:
            used = f"{part['slots_used']}/{part['slots']}"
            table.add_row(size_text(part["slab_bytes"]), name, used)
    return table


def _prefetch(history: History) -> Table:
    """Experts read ahead, by what became of them: in the last second, minute and ever."""
    table = _table("read ahead", *PREFETCH_OUTCOMES)
    for name, _ in _shown_tiers(history):
        counts = [
            "  ".join(
                f"{history.growth(f'tiers.{name}.prefetch.{outcome}', window_s):,.0f}"
                for window_s in WINDOWS
            )
            for outcome in PREFETCH_OUTCOMES
        ]
        table.add_row(name, *counts)
    return table


def _layers(history: History) -> Iterator[Text]:
    """Each layer a character: how much of it is in the tier, and its misses of the last minute."""
    for name, tier in _shown_tiers(history):
        if tier["layer_residents"]:
            held = sparkline(tier["layer_residents"], history.now["experts_per_layer"])
            missed = sparkline(history.layer_growth(name, WINDOWS_S[1]))
            yield Text(f"{name:<5} layers hold {held}", overflow="fold")
            yield Text(f"{name:<5} layers miss {missed}", overflow="fold")


def _clients(history: History) -> Table:
    clients = history.now["clients"]
    table = _table(f"clients {len(clients)}", "pid", "t/s 1 s", "60 s", "tokens", "hits")
    for client in clients[:MAX_CLIENT_ROWS]:
        lookups = client["hits"] + client["misses"]
        table.add_row(
            str(client["client"]),
            str(client["pid"]),
            *(f"{history.client_rate(client, window_s):,.1f}" for window_s in WINDOWS_S),
            f"{client['tokens']:,}",
            percent(client["hits"] / lookups if lookups else None),
        )
    return table


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, no_wrap=True)
    return table
