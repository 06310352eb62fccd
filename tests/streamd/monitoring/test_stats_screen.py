"""What the live view leaves out where there is nothing to tell."""

import pytest
from rich.console import Console

from streamd.monitoring.stats_history import History
from streamd.monitoring.stats_screen import draw


def tier(slots: int, hinted: int = 0) -> dict[str, object]:
    counts = dict.fromkeys(("hits", "misses", "evictions", "slots_used", "bytes"), 0)
    lists: dict[str, object] = {"classes": [], "layer_residents": [], "layer_misses": []}
    ahead = {"hinted": hinted, "useful": hinted, "late": 0, "wasted": 0}
    return {**counts, **lists, "slots": slots, "prefetch": ahead}


def drawn(host: dict[str, object], gpu: dict[str, object]) -> str:
    reads = dict.fromkeys(("in_flight_reads", "in_flight_bytes", "waiting_reads", "bytes_read"), 0)
    history = History()
    history.add({
        "name": "demo", "model": "/m.gguf", "uptime_s": 5.0, "fault": None, "clients": [],
        "io": {**reads, "engine": "pread", "latency_ms_p50": 0.5, "latency_ms_p99": 2.0},
        "tiers": {"host": host, "gpu": gpu},
        "memory": {"rss_bytes": 1, "available_bytes": 2}, "experts_per_layer": 8,
    })  # fmt: skip
    console = Console(width=120)
    with console.capture() as captured:
        console.print(draw(history))
    return captured.get()


@pytest.mark.parametrize("gpu_slots", [0, 4])
def test_pcie_is_of_a_gpu_tier(gpu_slots):
    assert ("PCIe" in drawn(tier(8), tier(gpu_slots))) == bool(gpu_slots)


@pytest.mark.parametrize("hinted", [0, 7])
def test_what_was_read_ahead_is_shown_once_something_was_hinted(hinted):
    text = drawn(tier(8, hinted), tier(0))
    assert ("read ahead" in text) == bool(hinted)
    assert "disk" in text
