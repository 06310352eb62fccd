"""What bench-io found, kept from one start to the next."""

import json
import os
from dataclasses import replace

import pytest

from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from streamd.commands.io_best import IoBest, cache_path, load_best, reads_of, save_best

BEST = IoBest("uring-api", 8, 2970.5)


@pytest.fixture(autouse=True)
def cache_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_what_is_saved_is_found_again_for_those_reads_only():
    save_best("8:1/21", BEST)
    save_best("8:17/21", IoBest("pread", 32, 500.0))
    assert load_best("8:1/21", 32) == BEST
    assert load_best("8:17/21", 32) == IoBest("pread", 32, 500.0)
    assert load_best("8:1/17", 32) is None
    save_best("8:1/21", IoBest("liburing", 4, 7000.0))
    assert load_best("8:1/21", 32) == IoBest("liburing", 4, 7000.0)
    assert os.listdir(cache_path().parent) == [cache_path().name], "no temporary file is left"


def test_nothing_is_found_where_nothing_was_saved():
    assert load_best("8:1/21", 32) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"8:1/21": null}',
        b'{"8:1/21": {"engine": "mmap", "depth": 8, "mb_s": 1.0}}',
        b'{"8:1/21": {"engine": "pread", "depth": 0, "mb_s": 1.0}}',
        b'{"8:1/21": {"engine": "pread", "depth": 33, "mb_s": 1.0}}',
        b'{"8:1/21": {"engine": "pread", "depth": "8", "mb_s": 1.0}}',
        b'{"8:1/21": {"engine": "pread"}}',
    ],
)
def test_a_damaged_cache_counts_as_empty_and_is_mended(content):
    cache_path().parent.mkdir(parents=True)
    cache_path().write_bytes(content)
    assert load_best("8:1/21", 32) is None
    save_best("8:1/21", BEST)
    assert load_best("8:1/21", 32) == BEST
    assert isinstance(json.loads(cache_path().read_bytes()), dict)


def test_a_cache_that_cannot_be_written_is_an_error_of_the_system(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(OSError, match="/proc/nowhere"):
        save_best("8:1/21", BEST)


def experts_with_parts_of(demo_model, *part_bytes: int) -> ExpertIndex:
    experts = ExpertIndex.from_gguf(GgufIndex.open(demo_model))
    return replace(experts, classes=[replace(experts.classes[0], part_bytes=part_bytes)])


def test_reads_are_named_by_the_drives_numbers_and_the_size_of_the_largest_part(demo_model):
    device = demo_model.stat().st_dev
    drive = f"{os.major(device)}:{os.minor(device)}"
    for part_bytes, log2 in (
        ((1 << 20, 4096, 8192), 20),
        (((1 << 20) + 4096, 4096, 8192), 21),
        ((4096, 4096, 4 << 20), 22),
        ((64 << 20, 64 << 20, 64 << 20), 22),  # the reader cuts them into pieces of 4 MiB
    ):
        experts = experts_with_parts_of(demo_model, *part_bytes)
        assert reads_of(demo_model, experts) == f"{drive}/{log2}"


def test_a_model_of_other_slabs_on_the_same_drive_has_its_own(demo_model):
    small = reads_of(demo_model, experts_with_parts_of(demo_model, 40_000, 40_000, 40_000))
    large = reads_of(demo_model, experts_with_parts_of(demo_model, *3 * (1_622_016,)))
    save_best(large, BEST)
    save_best(small, IoBest("pread", 32, 872.0))
    assert load_best(large, 32) == BEST
    assert load_best(small, 32) == IoBest("pread", 32, 872.0)


def test_what_was_kept_by_the_drive_alone_counts_as_empty(demo_model):
    reads = reads_of(demo_model, experts_with_parts_of(demo_model, 4096, 4096, 4096))
    save_best(reads.partition("/")[0], BEST)
    assert load_best(reads, 32) is None
