"""What bench-io found for a drive is what a served model's reader starts with."""

from contextlib import ExitStack
from dataclasses import replace

import pytest

from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from shared.io_choice import IoChoice
from streamd.commands.io_best import IoBest, reads_of, save_best
from streamd.config import StreamdConfig
from streamd.readers.depth import MAX_LIMIT_BYTES, MIN_LIMIT_BYTES, START_LIMIT_BYTES
from streamd.readers.direct import open_file
from streamd.readers.reader import PIECE_BYTES
from streamd.served_reader import DEFAULT_DEPTH, make_reader, start_limit_bytes

PART_BYTES = 1_622_016


@pytest.fixture(autouse=True)
def cache_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def experts(demo_model):
    return ExpertIndex.from_gguf(GgufIndex.open(demo_model))


def _with_parts_of(experts: ExpertIndex, size_bytes: int) -> ExpertIndex:
    parts = (size_bytes, size_bytes, size_bytes // 2)
    return replace(experts, classes=[replace(experts.classes[0], part_bytes=parts)])


@pytest.fixture
def make(demo_model, experts):
    """(reader, its limit) of a model whose parts are of 1.6 MB."""
    with ExitStack() as stack:

        def make_one(**options: object):
            config = StreamdConfig(model=demo_model, **options)
            file = open_file(demo_model)
            stack.callback(file.close)
            large = _with_parts_of(experts, PART_BYTES)
            reader = make_reader([file], large, 4096, config, stack)
            return reader, reader.stats().limit_bytes

        yield make_one


@pytest.fixture
def reads(demo_model, experts):
    return reads_of(demo_model, _with_parts_of(experts, PART_BYTES))


def test_without_a_measurement_it_starts_where_most_drives_are_busy(make):
    reader, limit_bytes = make()
    assert (reader.depth, limit_bytes) == (DEFAULT_DEPTH, START_LIMIT_BYTES)


@pytest.mark.parametrize("depth", [4, 8, 32])
def test_it_starts_with_the_engine_and_the_depth_that_were_best(make, reads, depth):
    save_best(reads, IoBest("pread", depth, 2970.5))
    reader, limit_bytes = make()
    assert reader.stats().engine == "pread"
    assert limit_bytes == depth * PART_BYTES
    assert reader.depth == DEFAULT_DEPTH, "it may find that more is better today"


def test_a_best_depth_beyond_the_default_is_possible(make, reads):
    save_best(reads, IoBest("pread", 2 * DEFAULT_DEPTH, 2970.5))
    assert make()[0].depth == 2 * DEFAULT_DEPTH


def test_what_was_best_for_smaller_reads_does_not_count(make, demo_model, experts):
    small = reads_of(demo_model, _with_parts_of(experts, PART_BYTES // 16))
    save_best(small, IoBest("pread", 2 * DEFAULT_DEPTH, 872.0))
    reader, limit_bytes = make()
    assert (reader.depth, limit_bytes) == (DEFAULT_DEPTH, START_LIMIT_BYTES)


def test_what_is_said_counts_more(make, reads):
    save_best(reads, IoBest("liburing", 32, 2970.5))
    reader, _ = make(io_depth=5, io=IoChoice("pread"))
    assert (reader.depth, reader.stats().engine) == (5, "pread")


@pytest.mark.parametrize(
    ("depth", "part_bytes", "expected_bytes"),
    [
        (8, 3_244_032, 8 * 3_244_032),
        (8, 21 << 20, 8 * PIECE_BYTES),  # the reader cuts them
        (1, 4096, MIN_LIMIT_BYTES),
        (1024, 3_244_032, MAX_LIMIT_BYTES),
    ],
)
def test_a_depth_in_reads_becomes_a_limit_in_bytes(experts, depth, part_bytes, expected_bytes):
    assert start_limit_bytes(depth, _with_parts_of(experts, part_bytes)) == expected_bytes
