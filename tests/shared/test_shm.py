"""Shared memory: clients see what the daemon writes, and can neither write nor shrink it."""

import ctypes
import fcntl
import mmap
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared import shm
from shared.errors import ConfigError

SIZE = 3 * mmap.PAGESIZE
PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
FALLOC_PUNCH_HOLE = 0x03  # with FALLOC_FL_KEEP_SIZE

_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def fd():
    fd = shm.create("test", SIZE)
    yield fd
    os.close(fd)


@pytest.fixture
def sealed(fd):
    """As the daemon shares it: its own mapping first, then the seal."""
    memory = shm.map_writable(fd, SIZE)
    memory[:5] = b"slabs"
    shm.seal_readonly(fd)
    return memory


def reopened(fd):
    """Another descriptor of it, as anybody gets it who has one that is read-only."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def test_new_memory_is_zero_and_has_no_name(fd):
    with shm.map_readonly(fd, SIZE) as memory:
        assert memory[:] == bytes(SIZE)
    assert os.readlink(f"/proc/self/fd/{fd}").endswith("(deleted)")
    assert not os.get_inheritable(fd)


def test_what_the_owner_writes_after_the_seal_is_seen(fd, sealed):
    with shm.map_readonly(fd, SIZE) as theirs:
        assert theirs[:5] == b"slabs"
        sealed[:5] = b"more!"
        assert theirs[:5] == b"more!"


@pytest.mark.parametrize("how", ["given", "reopened"])
def test_nobody_else_can_map_it_writable(fd, sealed, how):
    theirs = os.dup(fd) if how == "given" else reopened(fd)
    try:
        with pytest.raises(ConfigError, match="Operation not permitted"):
            shm.map_writable(theirs, SIZE)
        with pytest.raises(PermissionError):
            os.pwrite(theirs, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(theirs, 0)
        with pytest.raises(PermissionError):
            os.ftruncate(theirs, 2 * SIZE)
    finally:
        os.close(theirs)
    assert sealed[:5] == b"slabs"


def test_a_mapping_for_reading_cannot_be_made_writable(fd, sealed):
    with shm.map_readonly(fd, SIZE) as theirs:
        with pytest.raises(TypeError):
            theirs[0] = 1
        address = ctypes.c_void_p(shm.address(theirs))
        assert _libc.mprotect(address, ctypes.c_size_t(SIZE), PROT_READ_WRITE) == -1


def test_no_hole_can_be_punched_into_it(fd, sealed):
    fallocate = _libc.fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    assert fallocate(fd, FALLOC_PUNCH_HOLE, 0, SIZE) == -1
    assert sealed[:5] == b"slabs"


def test_the_seal_is_for_good(fd, sealed):
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    assert seals & shm.F_SEAL_FUTURE_WRITE
    assert seals & fcntl.F_SEAL_SHRINK
    assert seals & fcntl.F_SEAL_GROW


def test_unsealed_memory_is_written_by_both_and_resized_by_none(fd):
    with shm.map_writable(fd, SIZE) as ours, shm.map_writable(fd, SIZE) as theirs:
        theirs[7] = 42
        assert ours[7] == 42
    for size in (0, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


@pytest.mark.parametrize("map_it", [shm.map_readonly, shm.map_writable])
def test_a_region_smaller_than_was_announced_is_not_mapped(fd, map_it):
    with pytest.raises(ConfigError, match=f"has {SIZE} bytes, {SIZE + 1} were announced"):
        map_it(fd, SIZE + 1)


@contextmanager
def limited(kind, limit):
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def test_memory_that_cannot_be_made_leaves_no_descriptor():
    open_before = os.listdir("/proc/self/fd")
    with limited(resource.RLIMIT_FSIZE, SIZE), pytest.raises(ConfigError) as refusal:
        shm.create("test", SIZE + 1)
    assert refusal.value.message == f"cannot make {SIZE + 1} bytes of shared memory: File too large"
    assert "--host-cache" in refusal.value.remedy
    assert os.listdir("/proc/self/fd") == open_before


def test_more_than_may_be_mapped():
    terabyte = 1 << 40
    fd = shm.create("test", terabyte)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    with (
        limited(resource.RLIMIT_AS, used_bytes + terabyte // 2),
        pytest.raises(ConfigError, match=f"cannot map {terabyte} bytes") as refusal,
    ):
        shm.map_readonly(fd, terabyte)
    assert "ulimit -v" in refusal.value.remedy
    os.close(fd)


def test_the_address_is_where_the_bytes_are(fd, sealed):
    for memory in (sealed, shm.map_readonly(fd, SIZE)):
        assert ctypes.string_at(shm.address(memory), 5) == b"slabs"
        assert shm.address(memory) % mmap.PAGESIZE == 0


def test_only_a_sealed_region_is_taken_for_one(fd):
    """One that is given out for reading may lose its pages."""
    readable = shm.open_readonly(fd)
    assert not shm.is_sealed(readable)
    os.close(readable)
    shm.seal_readonly(fd)
    assert shm.is_sealed(fd)
