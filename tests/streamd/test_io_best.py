"""What bench-io found, kept from one start to the next."""

import json
import os

import pytest

from streamd.io_best import IoBest, cache_path, drive_of, load_best, save_best

BEST = IoBest("uring-api", 8, 2970.5)


@pytest.fixture(autouse=True)
def cache_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_what_is_saved_is_found_again_for_that_drive_only():
    save_best("8:1", BEST)
    save_best("8:17", IoBest("pread", 32, 500.0))
    assert load_best("8:1", 32) == BEST
    assert load_best("8:17", 32) == IoBest("pread", 32, 500.0)
    assert load_best("8:2", 32) is None
    save_best("8:1", IoBest("liburing", 4, 7000.0))
    assert load_best("8:1", 32) == IoBest("liburing", 4, 7000.0)
    assert os.listdir(cache_path().parent) == [cache_path().name], "no temporary file is left"


def test_nothing_is_found_where_nothing_was_saved():
    assert load_best("8:1", 32) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"8:1": null}',
        b'{"8:1": {"engine": "mmap", "depth": 8, "mb_s": 1.0}}',
        b'{"8:1": {"engine": "pread", "depth": 0, "mb_s": 1.0}}',
        b'{"8:1": {"engine": "pread", "depth": 33, "mb_s": 1.0}}',
        b'{"8:1": {"engine": "pread", "depth": "8", "mb_s": 1.0}}',
        b'{"8:1": {"engine": "pread"}}',
    ],
)
def test_a_damaged_cache_counts_as_empty_and_is_mended(content):
    cache_path().parent.mkdir(parents=True)
    cache_path().write_bytes(content)
    assert load_best("8:1", 32) is None
    save_best("8:1", BEST)
    assert load_best("8:1", 32) == BEST
    assert isinstance(json.loads(cache_path().read_bytes()), dict)


def test_a_cache_that_cannot_be_written_is_an_error_of_the_system(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(OSError, match="/proc/nowhere"):
        save_best("8:1", BEST)


def test_a_drive_is_named_by_its_device_numbers(tmp_path):
    device = tmp_path.stat().st_dev
    assert drive_of(tmp_path) == f"{os.major(device)}:{os.minor(device)}"
