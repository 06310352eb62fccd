"""Opening model files: O_DIRECT where it can be had, and an honest account where it cannot."""

import errno
import os
from pathlib import Path

import pytest

from shared.errors import ModelError
from streamd.readers.direct import ALIGN_FALLBACK_BYTES, dio_align_bytes, open_file


def open_flags(fd: int) -> int:
    for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines():
        if line.startswith("flags:"):
            return int(line.split()[1], 8)
    raise AssertionError("fdinfo has no flags")


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(10_000))
    return path


def test_a_file_on_a_disk_is_opened_direct(path):
    file = open_file(path)
    try:
        if not file.direct:
            pytest.skip(f"no direct I/O here: {file.reason}")
        assert open_flags(file.fd) & os.O_DIRECT
        assert os.get_inheritable(file.fd) is False
        assert file.reason == ""
        assert (file.path, file.size_bytes) == (path, 10_000)
        assert file.align_bytes == dio_align_bytes(file.fd)
        assert file.align_bytes & (file.align_bytes - 1) == 0
    finally:
        file.close()


def test_the_stated_alignment_is_the_one_the_disk_insists_on(path):
    file = open_file(path)
    try:
        if not file.direct:
            pytest.skip(f"no direct I/O here: {file.reason}")
        memory = memoryview(bytearray(3 * file.align_bytes))
        with pytest.raises(OSError, match="Invalid argument"):
            os.preadv(file.fd, [memory[: file.align_bytes]], file.align_bytes // 2)
    finally:
        file.close()


@pytest.mark.parametrize("fault", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_filesystem_that_refuses_direct_reads_is_read_buffered(path, fault):
    def refuse(fd, buffers, offset):
        raise OSError(fault, os.strerror(fault))

    file = open_file(path, preadv=refuse)
    try:
        assert not file.direct
        assert not open_flags(file.fd) & os.O_DIRECT
        assert os.strerror(fault) in file.reason
        assert file.align_bytes == ALIGN_FALLBACK_BYTES
        assert os.pread(file.fd, 10_000, 0) == path.read_bytes()
        file.forget(0, 10_000)
    finally:
        file.close()


def test_a_filesystem_without_the_flag_is_read_buffered():
    file = open_file(Path("/proc/self/status"))
    try:
        assert not file.direct
        assert file.reason
        assert os.pread(file.fd, 5, 0) == b"Name:"
    finally:
        file.close()


@pytest.mark.parametrize(
    ("align_bytes", "word"), [(0, "support"), (1536, "1536"), (1 << 30, "1073741824")]
)
def test_an_alignment_that_cannot_be_used_means_buffered(path, align_bytes, word):
    file = open_file(path, align_of=lambda fd: align_bytes)
    try:
        assert not file.direct
        assert word in file.reason
    finally:
        file.close()


def test_a_large_alignment_is_tried_and_taken(path):
    file = open_file(path, align_of=lambda fd: 65536)
    try:
        if not file.direct:
            pytest.skip(f"no direct I/O here: {file.reason}")
        assert file.align_bytes == 65536
    finally:
        file.close()


def test_a_disk_error_is_not_taken_for_a_refusal(path):
    def fail(fd, buffers, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = open_descriptors()
    with pytest.raises(ModelError, match="Input/output error"):
        open_file(path, preadv=fail)
    assert open_descriptors() == before


@pytest.mark.parametrize("kind", ["missing", "directory", "fifo"])
def test_what_is_no_file_is_refused_by_name(tmp_path, kind):
    path = tmp_path / kind
    if kind == "directory":
        path.mkdir()
    if kind == "fifo":
        os.mkfifo(path)
    before = open_descriptors()
    with pytest.raises(ModelError, match=str(path)) as caught:
        open_file(path)
    assert caught.value.remedy
    assert open_descriptors() == before


def test_an_empty_file_opens(tmp_path):
    path = tmp_path / "empty"
    path.touch()
    file = open_file(path)
    assert file.size_bytes == 0
    file.close()


def test_changes_of_the_open_file_are_noticed(path):
    file = open_file(path)
    try:
        assert file.change() == ""
        os.utime(path, ns=(0, file.mtime_ns + 1))
        assert "written to" in file.change()
        os.truncate(path, 5000)
        assert "5000" in file.change()
        assert "10000" in file.change()
    finally:
        file.close()
