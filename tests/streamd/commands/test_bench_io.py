"""bench-io's rows on the demo model, with very short ones, and which row it calls the best."""

from contextlib import ExitStack
from dataclasses import asdict

import pytest

from shared.errors import ConfigError
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from streamd.commands.bench_io import DEPTHS, PATTERNS, Bench, Row, choose_best
from streamd.commands.io_best import IoBest
from streamd.readers.probe import ENGINES, FALLBACK, choose_engine
from streamd.readers.reader import PIECE_BYTES

SECONDS = 0.002
KEYS = {"engine", "pattern", "depth", "pages", "mb_s", "cpu_ms_per_gb"}
KEYS |= {"latency_ms_p50", "latency_ms_p99"}


@pytest.fixture
def bench(demo_model):
    with ExitStack() as stack:
        yield Bench(demo_model, stack, depth_max=4)


def working_engines() -> list[str]:
    names = []
    for name in ENGINES:
        try:
            choose_engine(name, 1)[0].close()
        except ConfigError:
            continue
        names.append(name)
    return names


def test_rows_are_of_all_engines_patterns_pages_and_depths(demo_model):
    with ExitStack() as stack:
        bench = Bench(demo_model, stack)
        rows = [bench.measure(*each, SECONDS) for each in bench.combinations()]
    cases = [(row.engine, row.pattern, row.pages, row.depth) for row in rows]
    kinds = {row.pages for row in rows}
    assert len(kinds) == 2
    assert {kind.split()[0] for kind in kinds} == {"shared", "private"}
    assert sorted(cases) == sorted(
        (engine, pattern, kind, depth)
        for engine in working_engines()
        for pattern in PATTERNS
        for kind in kinds
        for depth in DEPTHS
    )
    for row in rows:
        assert asdict(row).keys() == KEYS
        assert row.mb_s > 0
        assert row.cpu_ms_per_gb >= 0
        assert 0 < row.latency_ms_p50 <= row.latency_ms_p99


def test_an_engine_that_does_not_work_here_has_no_rows(demo_model, monkeypatch):
    def refused(name: str, depth: int):
        if name != FALLBACK:
            raise ConfigError("no ring")
        return choose_engine(name, depth)

    monkeypatch.setattr("streamd.commands.bench_io.choose_engine", refused)
    with ExitStack() as stack:
        bench = Bench(demo_model, stack)
        rows = [bench.measure(*each, 0) for each in bench.combinations()]
    assert {row.engine for row in rows} == {FALLBACK}
    assert choose_best(rows).engine == FALLBACK


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_measured_is_what_is_in_the_file(bench, demo_model, pattern):
    """A slab's slot begins with its gate, widened to a block; other slots were never read into."""
    kind = next(iter(bench.memories))
    row = bench.measure(FALLBACK, pattern, kind, 1, SECONDS)
    assert (row.engine, row.pattern, row.depth, row.pages) == (FALLBACK, pattern, 1, kind)
    content = demo_model.read_bytes()
    beginnings = [bytes(slot[:8192]) for slot in bench._slots(bench.memories[kind])]
    landed = [beginning for beginning in beginnings if any(beginning)]
    assert landed
    if pattern == "sequential":
        assert all(content.find(beginning) % PIECE_BYTES == 0 for beginning in landed)
        return
    experts = ExpertIndex.from_gguf(GgufIndex.open(demo_model))
    gates = [
        content[(gate := experts.extents(layer, expert)[0]).offset : gate.offset + 256]
        for size in experts.classes
        for layer in size.layers
        for expert in range(experts.n_experts)
    ]
    assert all(any(gate in beginning for gate in gates) for beginning in landed)


def row(engine: str, depth: int, mb_s: float, cpu: float = 50.0, **changes: str) -> Row:
    labels = {"pattern": "slabs", "pages": "shared 4 KiB"} | changes
    return Row(engine, labels["pattern"], depth, labels["pages"], mb_s, cpu, 1.0, 2.0)


def test_the_fastest_engine_is_best_with_the_least_depth_that_is_as_fast():
    rows = [
        row("pread", 32, 1000.0, cpu=5.0),
        row("liburing", 4, 2000.0),
        row("liburing", 8, 2950.0),
        row("liburing", 16, 3000.0),
        row("liburing", 32, 2990.0),
    ]
    assert choose_best(rows) == IoBest("liburing", 8, 2950.0)


def test_of_engines_as_fast_as_each_other_the_cheaper_one_is_best():
    rows = [
        row("liburing", 8, 2850.0, cpu=20.0),
        row("liburing", 16, 2860.0, cpu=20.0),
        row("uring-api", 8, 3000.0, cpu=60.0),
    ]
    assert choose_best(rows) == IoBest("liburing", 8, 2850.0)


def test_only_slabs_into_shared_memory_count():
    rows = [
        row("pread", 4, 1000.0),
        row("liburing", 4, 9000.0, pattern="sequential"),
        row("liburing", 4, 9000.0, pages="private transparent 2 MiB"),
    ]
    assert choose_best(rows) == IoBest("pread", 4, 1000.0)


def test_a_drive_that_does_not_answer_ends_it(bench, monkeypatch):
    monkeypatch.setattr("streamd.commands.bench_io.WAIT_MS", 1)
    monkeypatch.setattr("streamd.readers.pread_engine.PreadEngine.submit", lambda *_: None)
    monkeypatch.setattr(
        "streamd.commands.bench_io.Reader.close", lambda reader: reader._engine.close()
    )
    with pytest.raises(ConfigError, match="not answered"):
        bench.measure(FALLBACK, "slabs", next(iter(bench.memories)), 1, SECONDS)
