"""The daemon's statistics for people: `streamd stats`, and /stats in the chat."""

from typing import Any

from shared.sizes import size_text


def render_stats(values: dict[str, Any]) -> str:
    """A screenful: cumulative, and since somebody last asked."""
    host, io, since = values["tiers"]["host"], values["io"], values["since_last"]
    seconds = max(since["seconds"], 1e-9)
    lines = [
        *_fault_lines(values["fault"]),
        f"{values['name']}  pid {values['pid']}  up {duration(values['uptime_s'])}",
        f"model     {values['model']}",
        f"host      {host['slots_used']} of {host['slots']} slots, {size_text(host['bytes'])},"
        f" resident tensors {size_text(values['resident_bytes'])}",
        f"lookups   {_rate(host['hits'], host['misses'])}, {host['evictions']} evictions",
        f"  last {duration(since['seconds']):<6} {_rate(since['hits'], since['misses'])},"
        f" {since['evictions']} evictions",
        *_gpu_lines(values["tiers"]["gpu"]),
        *_ahead_lines(values["tiers"]),
        f"disk      {io['engine']}: {size_text(io['bytes_read'])} in {io['reads']} reads,"
        f" p50 {io['latency_ms_p50']:g} ms, p99 {io['latency_ms_p99']:g} ms",
        f"  last {duration(since['seconds']):<6} {size_text(since['bytes_read'])},"
        f" {since['bytes_read'] / seconds / 1e6:,.1f} MB/s",
        f"clients   {len(values['clients'])}",
    ]
    for client in values["clients"]:
        lines.append(
            f"  {client['client']:<3} pid {client['pid']:<8} {client['tokens']} tokens,"
            f" {_rate(client['hits'], client['misses'])}{_own_slots(client)}"
        )
    return "\n".join(lines)


def _own_slots(client: dict[str, Any]) -> str:
    """Of one that keeps GPU slots for itself, since its lookups here are what misses there."""
    hits, misses = client["own_hits"], client["own_misses"]
    return f"; in GPU slots of its own {_rate(hits, misses)}" if hits + misses else ""


def _fault_lines(fault: str | None) -> list[str]:
    """What comes first: why nothing is served, and what to do about it."""
    return [f"fault     {fault}"] if fault else []


def _gpu_lines(gpu: dict[str, Any]) -> list[str]:
    """Nothing where there is no GPU tier."""
    if not gpu["slots"]:
        return []
    return [
        f"gpu       {gpu['slots_used']} of {gpu['slots']} slots, {size_text(gpu['bytes'])},"
        f" resident tensors {size_text(gpu['resident_bytes'])}: {gpu['device']}",
        *_streamed_lines(gpu),
        f"lookups   {_rate(gpu['hits'], gpu['misses'])}, {gpu['evictions']} evictions,"
        f" {size_text(gpu['uploaded_bytes'])} uploaded",
    ]


def _streamed_lines(gpu: dict[str, Any]) -> list[str]:
    if not gpu["streamed_layers"]:
        return []
    return [
        f"streamed  resident tensors of {counted(gpu['streamed_layers'], 'layer')},"
        f" {size_text(gpu['streamed_bytes'])} a token"
    ]


def _ahead_lines(tiers: dict[str, Any]) -> list[str]:
    """Experts brought before anybody asked; nothing where that has not happened."""
    lines = []
    for name, tier in tiers.items():
        ahead, idle = tier["prefetch"], tier["backfill"]
        known = []
        if ahead["issued"]:
            known.append(
                f"{ahead['useful']} useful, {ahead['late']} late, {ahead['wasted']} wasted"
            )
        if idle["slabs"]:
            known.append(f"{idle['slabs']} while idle")
        if known:
            lines.append(f"ahead     {name}: {'; '.join(known)}")
    return lines


def _rate(hits: int, misses: int) -> str:
    lookups = hits + misses
    share = f"{100 * hits / lookups:.1f}%" if lookups else "-"
    return f"{lookups} lookups, {share} hits"


def counted(count: int, noun: str) -> str:
    """`1 layer`, `1,200 layers`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
