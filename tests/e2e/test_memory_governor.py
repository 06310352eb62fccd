"""A machine that runs short of memory while clients read: they are never stopped, nor torn."""

import os
from pathlib import Path

import numpy as np

HOST_CACHE = "9M"
MIB = 1 << 20


def slots_bytes(pid: int) -> int:
    """What the daemon's slots have in memory."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if "streamd-slots" in os.readlink(link):
            return link.stat().st_blocks * 512
    raise AssertionError("the daemon has no slots")


def read_until(reader, rng, condition) -> None:
    """Sections of what is asked for often and seldom, until then, and many in any case."""
    for turn in range(3000):
        layer = reader.layers[int(rng.integers(len(reader.layers)))]
        reader.read(layer, rng.choice(reader.experts.n_experts, 4, replace=False))
        if turn % 100 == 99 and condition():
            return
    raise AssertionError("it never happened")


def test_slots_are_given_back_and_taken_again_under_a_reader(
    place, demo_model, slab_reader, monkeypatch, tmp_path
):
    available = tmp_path / "available"
    monkeypatch.setenv("AVAILABLE", str(available))
    available.write_text(str(1 << 40))
    daemon = place.daemon(
        demo_model, "--name", "short", "--host-cache", HOST_CACHE, "--warm", "off",
        "--governor", "on", program="daemon_short_of_memory.py",
    )  # fmt: skip
    reader = slab_reader.SlabReader(demo_model, "short")
    rng = np.random.default_rng(6)
    read_until(reader, rng, lambda: slots_bytes(daemon.pid) > 8 * MIB)
    available.write_text("0")
    read_until(reader, rng, lambda: slots_bytes(daemon.pid) < 6 * MIB)
    available.write_text(str(1 << 40))
    read_until(reader, rng, lambda: slots_bytes(daemon.pid) > 8 * MIB)
    assert reader.torn_count == 0
    reader.close()
    assert "as memory allows" in daemon.log.read_text()
