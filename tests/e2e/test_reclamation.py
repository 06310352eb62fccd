"""Slots under eviction: nobody reads a slab that is being overwritten, and the grace period is why.

Several processes read slabs in place from a cache at its floor and compare them with the file.
"""

import json
from pathlib import Path

import pytest

READER_COUNT = 2  # what the floor admits
STRESS_S = 3.0


def _stress(place, model: Path, program: str) -> tuple[dict[str, int], dict]:
    """The readers' counts added up, and the daemon's statistics after them."""
    floor_bytes = place.plan(model)["floor_bytes"]
    daemon = place.daemon(model, "--host-cache", floor_bytes, program=program)
    words = (model, daemon.name, "--seconds", STRESS_S)
    readers = [
        place.start("slab_reader.py", *words, "--seed", seed) for seed in range(READER_COUNT)
    ]
    total = dict.fromkeys(("slabs", "torn", "sections", "hits", "misses"), 0)
    for reader in readers:
        out, err = reader.communicate(timeout=60)
        assert reader.returncode == 0, err
        counts = json.loads(out)
        total = {name: total[name] + counts[name] for name in total}
    return total, place.stats(daemon.name)


@pytest.mark.slow
def test_slabs_are_whole_while_slots_are_reused(place, streaming_model):
    total, stats = _stress(place, streaming_model, "streamd")
    assert total["torn"] == 0
    assert total["sections"] > 100
    assert total["hits"] > 100
    assert stats["tiers"]["host"]["evictions"] > 100
    assert stats["tiers"]["host"]["misses"] == total["misses"]


@pytest.mark.slow
def test_without_the_grace_period_slabs_are_torn(place, streaming_model):
    total, stats = _stress(place, streaming_model, "daemon_without_grace.py")
    assert stats["tiers"]["host"]["evictions"] > 100
    assert total["torn"] > 0
