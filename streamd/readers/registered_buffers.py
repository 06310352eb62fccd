"""Buffers known to a ring beforehand: their pages stay pinned, so a read need not pin them anew.

That is most of what a direct read into 4 KiB pages costs (docs/measurements.md). A slot's memory is
registered when it is first read into, so that start-up need not wait for a whole arena. Pinned
pages count against RLIMIT_MEMLOCK; once the kernel refuses one, the rest is read into as before.

    struct io_uring_rsrc_update2: u32 offset, u32 resv | u64 data (iovec *) | u64 tags (u64 *)
                                  | u32 nr, u32 resv2
    struct iovec:                 u64 base | u64 length
"""

import bisect
import ctypes
import errno
import os
import platform
import struct
from contextlib import suppress
from typing import Self

from streamd.readers.engine import address_of

# linux/io_uring.h; the package's own wrapper of the update wants a type that it does not export.
_SYS_IO_URING_SETUP = 425
_SYS_IO_URING_REGISTER = 427
_REGISTER_BUFFERS = 0
_UNREGISTER_BUFFERS = 1
_REGISTER_BUFFERS2 = 15
_REGISTER_BUFFERS_UPDATE = 16
_RSRC_REGISTER_SPARSE = 1
_SETUP_PARAMETERS_BYTES = 120  # struct io_uring_params
MAX_BUFFERS = 1 << 14
MAX_BUFFER_BYTES = 1 << 30

READV_FIXED_SINCE = (6, 15)
"""IORING_OP_READV_FIXED came with Linux 6.15; what is measured was measured from there on."""

# Pinned memory is limited, forbidden, or of a kind that cannot be pinned: reads work all the same.
_REFUSALS = (errno.ENOMEM, errno.EPERM, errno.EOPNOTSUPP, errno.EFAULT)

_libc = ctypes.CDLL(None, use_errno=True)


class RegisteredBuffers:
    """The table of one ring. Raises OSError where the kernel has none (before Linux 5.19)."""

    def __init__(self, ring_fd: int) -> None:
        self._ring_fd = ring_fd
        # Sorted by address; buffers never overlap.
        self._starts: list[int] = []
        self._entries: list[tuple[int, int]] = []  # end address, index
        self._refused = False
        self._unused: list[int] = []  # indices that were removed
        # struct io_uring_rsrc_register: u32 nr, u32 flags | u64 resv2 | u64 data | u64 tags
        table = struct.pack("=IIQQQ", MAX_BUFFERS, _RSRC_REGISTER_SPARSE, 0, 0, 0)
        _register(ring_fd, _REGISTER_BUFFERS2, table, len(table))

    def add(self, buffer: memoryview) -> bool:
        """Register a buffer, of which parts will be read into; False if it stays unregistered."""
        index = self._unused[-1] if self._unused else len(self._starts)
        if self._refused or index == MAX_BUFFERS or buffer.nbytes > MAX_BUFFER_BYTES:
            return False
        address = address_of(buffer)
        try:
            self._update(index, address, buffer.nbytes)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self._refused = True
            return False
        if self._unused:
            self._unused.pop()
        place = bisect.bisect(self._starts, address)
        self._starts.insert(place, address)
        self._entries.insert(place, (address + buffer.nbytes, index))
        return True

    def remove(self, buffer: memoryview) -> None:
        """Unpin a buffer that nothing is read into; nothing happens if it is not registered."""
        address = address_of(buffer)
        place = bisect.bisect_left(self._starts, address)
        if place == len(self._starts) or self._starts[place] != address:
            return
        _, index = self._entries[place]
        self._update(index, 0, 0)
        del self._starts[place], self._entries[place]
        self._unused.append(index)

    def _update(self, index: int, address: int, size_bytes: int) -> None:
        """Put a buffer into an entry of the table; at address 0, none."""
        iovec = ctypes.create_string_buffer(struct.pack("=QQ", address, size_bytes), 16)
        update = struct.pack("=IIQQII", index, 0, ctypes.addressof(iovec), 0, 1, 0)
        _register(self._ring_fd, _REGISTER_BUFFERS_UPDATE, update, len(update))

    def index_of(self, address: int, size_bytes: int) -> int | None:
        """The entry that covers these bytes, if there is one."""
        place = bisect.bisect(self._starts, address) - 1
        if place < 0:
            return None
        end, index = self._entries[place]
        return index if address + size_bytes <= end else None


class OwnRing:
    """A ring that nothing is read through, so that pinning may take its time on it.

    The kernel locks a ring while it registers buffers: on the reader's, reads would wait.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def open(cls) -> Self | None:
        """None where there is none to be had."""
        if not kernel_is_since(READV_FIXED_SINCE):
            return None
        parameters = ctypes.create_string_buffer(_SETUP_PARAMETERS_BYTES)
        fd = _libc.syscall(ctypes.c_long(_SYS_IO_URING_SETUP), 1, parameters)
        return None if fd < 0 else cls(fd)

    def pin_for_a_moment(self, buffer: memoryview) -> None:
        """Which gives it its pages; where it is refused nothing has happened."""
        iovec = struct.pack("=QQ", address_of(buffer), buffer.nbytes)
        with suppress(OSError):
            _register(self._fd, _REGISTER_BUFFERS, iovec, 1)
            _register(self._fd, _UNREGISTER_BUFFERS, None, 0)

    def close(self) -> None:
        os.close(self._fd)


def kernel_is_since(version: tuple[int, int]) -> bool:
    major, minor = (int(part) for part in platform.release().split(".")[:2])
    return (major, minor) >= version


def _register(ring_fd: int, opcode: int, argument: bytes | None, count: int) -> None:
    """`count`: bytes of a structure, or elements of an array."""
    result = _libc.syscall(ctypes.c_long(_SYS_IO_URING_REGISTER), ring_fd, opcode, argument, count)
    if result < 0:
        raise OSError(ctypes.get_errno(), "io_uring_register failed")
