"""What clients record in their rings comes out of the trace's file, or is counted as lost."""

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from replay_traces import load_trace

from shared.errors import ConfigError
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from shared.residency import RING_CELLS, ClientArea, TableShape
from streamd.records.trace import LOST, MAX_WAITING_CHUNKS, Tracer, TraceWriter, keep_older


@pytest.fixture
def experts(demo_model):
    return ExpertIndex.from_gguf(GgufIndex.open(demo_model))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.trace"


@pytest.fixture
def tracer(path, experts, demo_model):
    return Tracer(path, demo_model, experts)


@pytest.fixture
def new_area(experts):
    shape = TableShape(experts.n_layers, experts.n_experts)
    return lambda: ClientArea(bytearray(shape.area_bytes), shape)


def records_of(path):
    """(client, layer, use count, experts), read by the letter of the format."""
    line, _, body = path.read_bytes().partition(b"\n")
    cells = np.frombuffer(body, "<u2").tolist()
    records, at = [], 0
    while at < len(cells):
        client, layer, uses, count = cells[at : at + 4]
        records.append((client, layer, uses, cells[at + 4 : at + 4 + count]))
        at += 4 + count
    return json.loads(line), records


def test_records_come_in_order_with_who_made_them(tracer, path, new_area, experts):
    first, second = new_area(), new_area()
    first.record(2, np.array([7, 1, 3, 5]), 4)
    second.record(1, np.array([9, 8, 0, 2]), 4)
    first.record(3, np.arange(16), 100_000)
    tracer.take([(0, first), (5, second)])
    first.record(4, np.array([6]), 1)
    tracer.forget(0, first)
    tracer.close()
    header, records = records_of(path)
    assert records == [
        (0, 2, 4, [7, 1, 3, 5]),
        (0, 3, 0xFFFF, list(range(16))),
        (5, 1, 4, [9, 8, 0, 2]),
        (0, 4, 1, [6]),
    ]
    assert (header["format"], header["version"], header["top_k"]) == ("streamd-trace", 1, 4)
    sizes = [experts.classes[c].slab_bytes if c >= 0 else 0 for c in experts.layer_class]
    assert header["layer_bytes"] == sizes
    assert tracer.values() == {"file": str(path), "records": 4, "lost": 0}


def test_a_ring_goes_round(tracer, path, new_area):
    area = new_area()
    rng = np.random.default_rng(0)
    written = []
    for _ in range(RING_CELLS // 8):
        experts = rng.permutation(16)[: rng.integers(1, 16)]
        area.record(1, experts, len(experts))
        written.append((3, 1, len(experts), experts.tolist()))
        if rng.random() < 0.002:
            tracer.take([(3, area)])
    tracer.take([(3, area)])
    tracer.close()
    assert tracer.lost_count == 0
    assert records_of(path)[1] == written


def test_an_overrun_ring_is_lost_and_counted(tracer, path, new_area):
    area = new_area()
    area.record(1, np.array([1]), 1)
    tracer.take([(0, area)])
    count = RING_CELLS // 4 + 1
    for _ in range(count):
        area.record(2, np.array([2]), 1)
    tracer.take([(0, area)])
    area.record(3, np.array([3]), 1)
    tracer.take([(0, area)])
    tracer.close()
    assert records_of(path)[1] == [
        (0, 1, 1, [1]),
        (0, LOST, 0, [count, 0]),
        (0, 3, 1, [3]),
    ]
    assert tracer.values()["lost"] == count


@pytest.mark.parametrize("cells", [[7, 1, 1, 0], [1, 1, 1, 16], [1, 1, 9, 0], [1, 1]])
def test_what_is_no_record_is_lost(tracer, path, new_area, cells):
    area = new_area()
    area._ring[: len(cells)] = cells
    area._recorded[:] = len(cells), 1
    tracer.take([(0, area)])
    area.record(1, np.array([4]), 1)
    tracer.take([(0, area)])
    tracer.close()
    assert records_of(path)[1] == [(0, LOST, 0, [1, 0]), (0, 1, 1, [4])]


@pytest.mark.parametrize("recorded", [(2**64 - 1, 2**64 - 1), (RING_CELLS + 1, 0), (5, 2**63)])
def test_a_client_that_lies_about_its_ring_harms_nobody(tracer, new_area, recorded):
    area = new_area()
    area._recorded[:] = recorded
    for _ in range(3):
        tracer.take([(0, area)])
    area._recorded[:] = 0
    tracer.take([(0, area)])
    tracer.close()
    assert 0 <= tracer.values()["lost"] < 2**34


def test_replay_reads_it(tracer, path, new_area, experts):
    area = new_area()
    area.record(2, np.array([7, 1, 3, 5]), 4)
    area.record(3, np.arange(16), 64)
    tracer.take([(0, area)])
    area._recorded[:] += np.uint64(2 * RING_CELLS)
    tracer.take([(0, area)])
    area.record(3, np.array([0, 2]), 2)
    tracer.forget(0, area)
    tracer.close()
    assert tracer.lost_count > 0
    trace = load_trace(path)
    assert (trace.n_layers, trace.n_experts) == (experts.n_layers, experts.n_experts)
    assert trace.groups == (
        (True, (2 * 16 + 7, 2 * 16 + 1, 2 * 16 + 3, 2 * 16 + 5)),
        (False, tuple(range(3 * 16, 4 * 16))),
        (True, (3 * 16, 3 * 16 + 2)),
    )
    assert trace.key_bytes[3 * 16] == experts.classes[experts.layer_class[3]].slab_bytes


def test_a_disk_that_is_too_slow_holds_nobody_up(path, monkeypatch):
    go_on = threading.Event()
    writer = TraceWriter(path, b"")
    monkeypatch.setattr(writer, "_write", lambda chunk: go_on.wait(10))
    taken = [writer.put(b"x") for _ in range(2 * MAX_WAITING_CHUNKS)]
    go_on.set()
    writer.close()
    assert MAX_WAITING_CHUNKS <= sum(taken) <= MAX_WAITING_CHUNKS + 1


def test_a_place_that_cannot_be_written(tmp_path, demo_model, experts):
    with pytest.raises(ConfigError, match="cannot write the trace"):
        Tracer(tmp_path / "nowhere" / "a.trace", demo_model, experts)


def test_what_was_recorded_before_is_kept(path, experts, demo_model, new_area):
    """Of a daemon that opens its model anew, too: it closes its trace and begins another."""
    for layer in (1, 2, 3):
        tracer = Tracer(path, demo_model, experts)
        area = new_area()
        area.record(layer, np.array([layer]), 1)
        tracer.forget(0, area)
        tracer.close()
    names = [f"{path.name}.1", f"{path.name}.2", path.name]
    kept = [records_of(path.with_name(name))[1] for name in names]
    assert kept == [[(0, layer, 1, [layer])] for layer in (1, 2, 3)]


def test_older_traces_are_not_kept_for_ever(path, monkeypatch):
    monkeypatch.setattr("streamd.records.trace.MAX_KEPT", 2)
    for name in ("", ".1", ".2"):
        path.with_name(path.name + name).write_bytes(b"a trace")
    with pytest.raises(ConfigError, match="2 older traces") as refusal:
        keep_older(path)
    assert "remove some" in refusal.value.remedy
    assert path.read_bytes() == b"a trace"


@pytest.mark.parametrize("kind", ["empty", "pipe"])
def test_what_holds_no_trace_is_not_kept(path, kind):
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.touch()
    keep_older(path)
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_ends_the_trace_and_nothing_else(caplog):
    writer = TraceWriter(Path("/dev/full"), b"header")
    writer.put(b"x")
    writer.close()
    assert caplog.messages == ["the trace /dev/full ends here: No space left on device"]
    assert not writer.put(b"y")
