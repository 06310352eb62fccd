"""Buffers known to a ring beforehand: their pages stay pinned, so a read need not pin them anew.

That is most of what a direct read into 4 KiB pages costs (docs/measurements.md). A slot's memory is
registered when it is first read into: its pages have to come then anyway, and start-up need not
wait until a whole arena is pinned. Pinned pages count against RLIMIT_MEMLOCK; once the kernel
refuses one, the rest is read into as before.

    struct io_uring_rsrc_update2: u32 offset, u32 resv | u64 data (iovec *) | u64 tags (u64 *)
                                  | u32 nr, u32 resv2
    struct iovec:                 u64 base | u64 length
"""

import bisect
import ctypes
import errno
import struct

from streamd.readers.engine import address_of

# linux/io_uring.h; the package's own wrapper of the update wants a type that it does not export.
_SYS_IO_URING_REGISTER = 427
_REGISTER_BUFFERS2 = 15
_REGISTER_BUFFERS_UPDATE = 16
_RSRC_REGISTER_SPARSE = 1
MAX_BUFFERS = 1 << 14
MAX_BUFFER_BYTES = 1 << 30

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
        # struct io_uring_rsrc_register: u32 nr, u32 flags | u64 resv2 | u64 data | u64 tags
        table = struct.pack("=IIQQQ", MAX_BUFFERS, _RSRC_REGISTER_SPARSE, 0, 0, 0)
        self._register(_REGISTER_BUFFERS2, table)

    def add(self, buffer: memoryview) -> bool:
        """Register a buffer, of which parts will be read into; False if it stays unregistered."""
        index = len(self._starts)
        if self._refused or index == MAX_BUFFERS or buffer.nbytes > MAX_BUFFER_BYTES:
            return False
        address = address_of(buffer)
        iovec = ctypes.create_string_buffer(struct.pack("=QQ", address, buffer.nbytes), 16)
        update = struct.pack("=IIQQII", index, 0, ctypes.addressof(iovec), 0, 1, 0)
        try:
            self._register(_REGISTER_BUFFERS_UPDATE, update)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self._refused = True
            return False
        place = bisect.bisect(self._starts, address)
        self._starts.insert(place, address)
        self._entries.insert(place, (address + buffer.nbytes, index))
        return True

    def index_of(self, address: int, size_bytes: int) -> int | None:
        """The entry that covers these bytes, if there is one."""
        place = bisect.bisect(self._starts, address) - 1
        if place < 0:
            return None
        end, index = self._entries[place]
        return index if address + size_bytes <= end else None

    def _register(self, opcode: int, argument: bytes) -> None:
        result = _libc.syscall(
            ctypes.c_long(_SYS_IO_URING_REGISTER), self._ring_fd, opcode, argument, len(argument)
        )
        if result < 0:
            raise OSError(ctypes.get_errno(), "io_uring_register failed")
