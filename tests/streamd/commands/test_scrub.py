"""scrub on a sound file, a bad drive and a file that changes meanwhile."""

import errno
import os

import pytest
import xxhash

from shared.errors import ModelChanged, ModelError
from streamd.commands.scrub import AHEAD_COUNT, MAX_ERRORS_SHOWN, scrub
from streamd.readers.pread_engine import PreadEngine
from streamd.readers.reader import PIECE_BYTES


class BadDrive(PreadEngine):
    """Reads that touch a bad byte fail with EIO; `before_read(offset)` is called for each."""

    name = "bad drive"

    def __init__(self, bad: range, before_read=lambda offset: None):
        super().__init__(AHEAD_COUNT)
        self.bad, self.before_read = bad, before_read

    def submit(self, token: int, fd: int, buffer: memoryview, offset: int) -> None:
        self.before_read(offset)
        if offset < self.bad.stop and self.bad.start < offset + buffer.nbytes:
            self._in_flight.add(token)
            self._ended.put((token, -errno.EIO))
        else:
            super().submit(token, fd, buffer, offset)


def choosing(engine):
    return lambda preference, depth: (engine, [])


def test_each_shard_is_summed_and_progress_is_told(gguf_factory, tmp_path):
    first = gguf_factory.hy3_model(width=512).write(tmp_path / "m.gguf", shard_tensors=9)
    told = []
    reports = list(scrub(first, lambda *bytes_: told.append(bytes_)))
    paths = sorted(tmp_path.glob("*.gguf"))
    assert len(paths) > 2
    assert [report.path for report in reports] == paths
    for report, path in zip(reports, paths, strict=True):
        content = path.read_bytes()
        assert report.size_bytes == len(content)
        assert report.xxh3 == xxhash.xxh3_64_hexdigest(content)
        assert report.errors == []
    all_bytes = sum(path.stat().st_size for path in paths)
    assert told == sorted(told)
    assert told[-1] == (all_bytes, all_bytes)


def test_an_unreadable_range_is_reported_and_the_rest_is_read(demo_model):
    bad = 2 * PIECE_BYTES + 5000
    (report,) = scrub(demo_model, lambda *_: None, choosing(BadDrive(range(bad, bad + 512))))
    assert report.xxh3 == ""
    assert report.error_count == 1
    (error,) = report.errors
    assert error.startswith(f"bytes {2 * PIECE_BYTES} to {3 * PIECE_BYTES}: ")
    assert "Input/output error" in error


def test_a_dead_drive_does_not_fill_the_memory_with_errors(demo_model, tmp_path):
    large = tmp_path / "large.gguf"
    large.write_bytes(demo_model.read_bytes())
    os.truncate(large, PIECE_BYTES * 3 * MAX_ERRORS_SHOWN)
    size_bytes = large.stat().st_size
    (report,) = scrub(large, lambda *_: None, choosing(BadDrive(range(size_bytes))))
    assert report.error_count == 3 * MAX_ERRORS_SHOWN
    assert len(report.errors) == MAX_ERRORS_SHOWN


def test_a_file_that_is_written_to_meanwhile_ends_it(demo_model, tmp_path):
    path = tmp_path / "changing.gguf"
    path.write_bytes(demo_model.read_bytes())

    def change(offset: int) -> None:
        if offset == 3 * PIECE_BYTES:
            with path.open("r+b") as file:
                file.seek(4 * PIECE_BYTES)
                file.write(b"other bytes")

    with pytest.raises(ModelChanged, match=r"changing\.gguf"):
        list(scrub(path, lambda *_: None, choosing(BadDrive(range(0), change))))


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ModelError):
        list(scrub(tmp_path / "absent.gguf", lambda *_: None))
