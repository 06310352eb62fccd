"""Shared memory by descriptor: memfds that have no name, so nothing is left behind by a crash.

The owner maps a region writable and then seals it; whoever gets the descriptor later can map it
for reading only, also when it reopens it through /proc.
"""

import fcntl
import mmap
import os

import numpy as np

from shared.errors import ConfigError

# linux/fcntl.h; Python's fcntl module names this one from 3.13 on only.
F_SEAL_FUTURE_WRITE = 0x0010


def create(name: str, size_bytes: int, huge_pages: bool = False) -> int:
    """A new memfd of `size_bytes`, zero-filled and not yet backed by pages; the descriptor.

    huge_pages: on hugetlb pages of 2 MiB, of which `size_bytes` must be a multiple. Whether enough
    of them are left shows when it is mapped.
    """
    assert size_bytes > 0
    fd = -1
    try:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if huge_pages:
            flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
        fd = os.memfd_create(name, flags)
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise ConfigError(
            f"cannot make {size_bytes} bytes of shared memory: {error.strerror}",
            "raise the limit on open files (ulimit -n), or give a smaller --host-cache",
        ) from error
    return fd


def seal_readonly(fd: int) -> None:
    """No new writable mapping from now on; mappings that exist stay writable."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)


def is_sealed(fd: int) -> bool:
    """Whether it is sealed against writing; then the kernel gives none of its pages back either."""
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & F_SEAL_FUTURE_WRITE)


def open_readonly(fd: int) -> int:
    """A descriptor for reading of the same memory, which nobody can open for writing from now on,
    unless the mode does not bind them: the owner may change it, and root does without."""
    os.fchmod(fd, 0o400)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"cannot open shared memory for reading: {error.strerror}", "mount /proc"
        ) from error


def map_writable(fd: int, size_bytes: int) -> mmap.mmap:
    return _map(fd, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE)


def map_readonly(fd: int, size_bytes: int) -> mmap.mmap:
    return _map(fd, size_bytes, mmap.PROT_READ)


def _map(fd: int, size_bytes: int, protection: int) -> mmap.mmap:
    actual_bytes = os.fstat(fd).st_size
    # Touching pages behind the end would be SIGBUS, so the promise is checked first.
    if actual_bytes < size_bytes:
        raise ConfigError(f"a shared region has {actual_bytes} bytes, {size_bytes} were announced")
    try:
        return mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=protection)
    except OSError as error:
        raise ConfigError(
            f"cannot map {size_bytes} bytes of shared memory: {error.strerror}",
            "raise the limits on memory and files (ulimit -v, -n), or give a smaller --host-cache",
        ) from error


def address(region: mmap.mmap | memoryview) -> int:
    """Where the memory begins; numpy tells it of a read-only buffer too, which ctypes refuses."""
    return int(np.frombuffer(region, np.uint8).ctypes.data)
