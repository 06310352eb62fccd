"""io_uring through the package `liburing`.

Three of its habits shape this file. Its wait functions hold the GIL, so none is called: the ring's
descriptor is polled instead. An Iovec keeps no reference to its buffer, yet its constructor leaks
one: each is made of a bare address, and its hold on that released. And a preparation that fails
leaves its half-filled entry in the queue, so whatever can fail comes before the entry is taken.
"""

import ctypes
import errno
import sys

import liburing as uring

from streamd.readers.engine import DEPTH_MAX, address_of, submit_prepared
from streamd.readers.registered_buffers import (
    READV_FIXED_SINCE,
    RegisteredBuffers,
    kernel_is_since,
)

IOVECS_MAX = 1 << 16
"""Of 1.6 MB each they cover 100 GB of slots; a kept one takes about 0.7 kB."""


class LiburingEngine:
    """Raises OSError where the kernel refuses a ring (EPERM, ENOSYS, ENOMEM)."""

    name = "liburing"

    def __init__(self, depth: int) -> None:
        assert 0 < depth <= DEPTH_MAX
        self.depth = depth
        self._ring = uring.Ring()
        uring.io_uring_queue_init(depth, self._ring, 0)
        self._cqe = uring.Cqe()
        self._iovecs: dict[tuple[int, int], uring.Iovec] = {}
        # Keeps the buffers alive, and the Iovecs until the kernel has read them.
        self._in_flight: dict[int, tuple[memoryview, uring.Iovec]] = {}
        self._prepared_count = 0
        self._registered = _registered_buffers(self.fileno())

    def fileno(self) -> int:
        return int(self._ring.ring_fd)

    def register(self, buffer: memoryview) -> None:
        if self._registered is not None:
            self._registered.add(buffer)

    def forget(self, buffer: memoryview) -> None:
        if self._registered is not None:
            self._registered.remove(buffer)

    def submit(self, token: int, fd: int, buffer: memoryview, offset: int) -> None:
        assert len(self._in_flight) < self.depth
        assert token not in self._in_flight
        assert offset >= 0
        address = address_of(buffer)
        iovec = self._iovec(address, buffer.nbytes)
        index = self._registered and self._registered.index_of(address, buffer.nbytes)
        sqe = uring.io_uring_get_sqe(self._ring)
        assert sqe is not None, "the queue holds at least depth entries"
        if index is None:
            uring.io_uring_prep_readv(sqe, fd, iovec, offset)
        else:
            uring.io_uring_prep_readv_fixed(sqe, fd, iovec, index, offset)
        sqe.user_data = token
        self._in_flight[token] = buffer, iovec
        self._prepared_count += 1

    def flush(self) -> None:
        if self._prepared_count:
            submit_prepared(lambda: uring.io_uring_submit(self._ring), self._prepared_count)
            self._prepared_count = 0

    def reap(self) -> list[tuple[int, int]]:
        ended = []
        for _ in uring.CqeIter(self._ring, self._cqe):
            entry = self._cqe[0]
            try:
                result = entry.res
            except OSError as error:
                result = -(error.errno or errno.EIO)
            ended.append((entry.user_data, result))
        uring.io_uring_cq_advance(self._ring, len(ended))
        for token, _ in ended:
            del self._in_flight[token]
        return ended

    def close(self) -> None:
        uring.io_uring_queue_exit(self._ring)

    def _iovec(self, address: int, size_bytes: int) -> uring.Iovec:
        key = (address, size_bytes)
        iovec = self._iovecs.get(key)
        if iovec is None:
            if len(self._iovecs) == IOVECS_MAX:
                del self._iovecs[next(iter(self._iovecs))]
            iovec = self._iovecs[key] = _make_iovec(address, size_bytes)
        return iovec


def _make_iovec(address: int, size_bytes: int) -> uring.Iovec:
    view = memoryview((ctypes.c_ubyte * size_bytes).from_address(address))
    before = sys.getrefcount(view)
    iovec = uring.Iovec([view])
    for _ in range(sys.getrefcount(view) - before):
        # Py_buffer: void *buf, PyObject *obj, and nine more fields that the release does not read
        held = (ctypes.c_void_p * 16)(0, id(view))
        ctypes.pythonapi.PyBuffer_Release(held)
    return iovec


def _registered_buffers(ring_fd: int) -> RegisteredBuffers | None:
    """None where the kernel cannot read vectors into registered buffers."""
    if not kernel_is_since(READV_FIXED_SINCE):
        return None
    try:
        return RegisteredBuffers(ring_fd)
    except OSError:
        return None
