"""Streaming is real: what the kernel says about the daemon, beside what the daemon says of itself.

All with the host cache at the floor, so that experts must come from the disk again and again.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.arena import PART_COUNT, round_up
from shared.daemon_memory import process_bytes
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from shared.residency import NOT_RESIDENT
from streamd.readers.direct import open_file

# Pages of libraries that the kernel may fetch for the daemon meanwhile.
STRAY_BYTES = 2 << 20
HUGE_PAGE_BYTES = 2 << 20  # the last one may stick out
PROMPT = "Can you find me a restaurant in San Jose?"


@pytest.fixture(scope="module")
def floor_bytes(module_place, streaming_model) -> int:
    return module_place.plan(streaming_model)["floor_bytes"]


@pytest.fixture(scope="module")
def align_bytes(streaming_model) -> int:
    """Alignment of direct reads; skips where the filesystem has none."""
    file = open_file(streaming_model)
    file.close()
    if not file.direct:
        pytest.skip(f"no direct I/O here: {file.reason}")
    return file.align_bytes


@pytest.fixture(scope="module")
def daemon(module_place, streaming_model, floor_bytes) -> Any:
    return module_place.daemon(streaming_model, "--host-cache", floor_bytes)


@pytest.fixture
def readers(slab_reader, streaming_model, daemon) -> Iterator[list[Any]]:
    """Two clients without a model."""
    readers = [slab_reader.SlabReader(streaming_model, daemon.name) for _ in range(2)]
    yield readers
    for reader in readers:
        reader.close()


def _mappings(pid: int) -> list[tuple[str, dict[str, int]]]:
    """The path and the byte counts (Size, Rss, ...) of each mapping of a process."""
    mappings: list[tuple[str, dict[str, int]]] = []
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            mappings.append(("".join(line.split(maxsplit=5)[5:]), {}))
        elif count := re.match(r"(\w+): +(\d+) kB", line):
            mappings[-1][1][count[1]] = int(count[2]) * 1024
    return mappings


def _disk_bytes(pid: int) -> int:
    """What the kernel has fetched from disks for a process."""
    return int(re.search(r"(?m)^read_bytes: (\d+)", Path(f"/proc/{pid}/io").read_text())[1])


def _growth(before: dict[str, Any], after: dict[str, Any], part: str) -> dict[str, int]:
    """Of the statistics' counters in "io" or, for "host", in that tier."""
    old, new = (
        values[part] if part in values else values["tiers"][part] for values in (before, after)
    )
    return {name: new[name] - old[name] for name in new if isinstance(new[name], int)}


def test_the_model_is_read_past_the_page_cache(daemon, streaming_model, align_bytes):
    directory = Path(f"/proc/{daemon.pid}/fd")
    opened = [fd for fd in directory.iterdir() if fd.resolve() == streaming_model.resolve()]
    assert opened
    for fd in opened:
        facts = Path(f"/proc/{daemon.pid}/fdinfo/{fd.name}").read_text()
        flags = int(re.search(r"(?m)^flags:\s+(\d+)", facts)[1], 8)
        assert flags & os.O_DIRECT


def test_an_answer_reads_what_it_misses(module_place, daemon, streaming_model, align_bytes):
    before, disk_before = module_place.stats(daemon.name), _disk_bytes(daemon.pid)
    done = module_place.run("infer", "chat", "--model", streaming_model, "--temp", 0, "-p", PROMPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    after, disk_bytes = module_place.stats(daemon.name), _disk_bytes(daemon.pid) - disk_before
    host, io = _growth(before, after, "host"), _growth(before, after, "io")
    assert host["misses"] > 50
    assert host["evictions"] > 0
    assert io["bytes_read"] <= disk_bytes <= io["bytes_read"] + STRAY_BYTES
    experts = ExpertIndex.from_gguf(GgufIndex.open(streaming_model))
    sizes = [size.slab_bytes for size in experts.classes]
    assert host["misses"] * min(sizes) <= io["useful_bytes"] <= host["misses"] * max(sizes)
    # Each part of a slab may be widened by less than a block at both ends.
    widening_bytes = host["misses"] * PART_COUNT * 2 * align_bytes
    assert io["useful_bytes"] <= io["bytes_read"] <= io["useful_bytes"] + widening_bytes


def test_a_miss_reads_its_slab_widened_to_blocks(daemon, readers, streaming_model, align_bytes):
    reader = readers[0]
    file_bytes = streaming_model.stat().st_size
    absent = {
        layer: np.flatnonzero(reader.client.mapping.table.host_slots[layer] == NOT_RESIDENT)
        for layer in reader.layers
    }
    layers = [layer for layer in reader.layers if len(absent[layer]) >= reader.experts.top_k]
    for layer in (layers[0], layers[-1]):
        experts = absent[layer][: reader.experts.top_k]
        extents = [e for expert in experts for e in reader.experts.extents(layer, int(expert))]
        starts = [e.offset // align_bytes * align_bytes for e in extents]
        ends = [-(-(e.offset + e.length) // align_bytes) * align_bytes for e in extents]
        wanted = sum(min(end, file_bytes) - s for s, end in zip(starts, ends, strict=True))
        before = reader.client.stats()
        reader.read(layer, experts)
        io = _growth(before, reader.client.stats(), "io")
        assert (io["bytes_read"], io["reads"]) == (wanted, len(extents))
    assert reader.torn_count == 0


def test_hits_cost_neither_reads_nor_messages(readers):
    first, second = readers
    layer, experts = first.layers[0], np.arange(first.experts.top_k)
    first.read(layer, experts)
    before = first.client.stats()
    fetches_before = [reader.client.mapping.area.fetches for reader in readers]
    for reader in (second, first, second):
        reader.read(layer, experts)
    after = first.client.stats()
    assert _growth(before, after, "io")["reads"] == 0
    host = _growth(before, after, "host")
    assert (host["hits"], host["misses"]) == (3 * len(experts), 0)
    assert [reader.client.mapping.area.fetches for reader in readers] == fetches_before
    assert [client["fetches"] for client in after["clients"]] == fetches_before
    assert first.torn_count == second.torn_count == 0


def test_slots_stay_within_the_budget_and_the_daemon_is_small(daemon, floor_bytes, readers):
    reader = readers[0]
    for first in range(0, reader.experts.n_experts, reader.experts.top_k):
        reader.read(reader.layers[0], first + np.arange(reader.experts.top_k))
    mappings = _mappings(daemon.pid)
    (slots,) = [counts for name, counts in mappings if name.startswith("/memfd:streamd-slots")]
    used_bytes = sum(slots.get(name, 0) for name in ("Rss", "Shared_Hugetlb", "Private_Hugetlb"))
    assert 0 < used_bytes <= slots["Size"] <= round_up(floor_bytes, HUGE_PAGE_BYTES)
    own_bytes = sum(counts["Rss"] for name, counts in mappings if not name.startswith("/memfd:"))
    print(f"the daemon itself: {own_bytes / 1e6:.1f} MB")
    assert own_bytes < process_bytes(False, reader.experts.expert_count), "as planned"


def test_the_daemon_knows_neither_torch_nor_compilers(daemon):
    libraries = {name for name, _ in _mappings(daemon.pid) if ".so" in name}
    assert any("numpy" in name for name in libraries), "the libraries it does need are seen"
    assert not [name for name in libraries if re.search("torch|numba|llvm|ggml", name)]
