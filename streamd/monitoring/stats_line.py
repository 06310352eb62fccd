"""One line of statistics: where --watch has no terminal to draw on."""

from streamd.monitoring.stats_history import WINDOWS_S, History


def render_line(history: History) -> str:
    """Rates since the line before, or a second ago."""
    window_s, _ = WINDOWS_S
    tiers = [tier for tier in ("host", "gpu") if history.now["tiers"][tier]["slots"]]
    hits = "  ".join(f"{tier} hits {percent(history.hit_share(tier, window_s))}" for tier in tiers)
    io = history.now["io"]
    return (
        f"{hits}  disk {history.rate('io.bytes_read', window_s) / 1e6:,.1f} MB/s"
        f" p99 {io['latency_ms_p99']:g} ms"
        f"  evictions {history.rate('tiers.host.evictions', window_s):,.0f}/s"
        f"  clients {len(history.now['clients'])}"
        f"  {history.rate('tokens', window_s):,.1f} t/s"
    )


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"
