"""io_uring through the package `uring-api`."""

import uring_api

from streamd.readers.engine import DEPTH_MAX, submit_prepared


class UringApiEngine:
    """Raises OSError where the kernel refuses a ring (EPERM, ENOSYS, ENOMEM)."""

    name = "uring-api"

    def __init__(self, depth: int) -> None:
        assert 0 < depth <= DEPTH_MAX
        self.depth = depth
        self._ring = uring_api.Ring(depth, auto_submit=False)
        self._in_flight: set[int] = set()  # the package itself keeps the buffers alive
        self._prepared_count = 0

    def fileno(self) -> int:
        return int(self._ring.fd)

    def register(self, buffer: memoryview) -> None:
        """Nothing to be gained here."""

    def forget(self, buffer: memoryview) -> None:
        """There is nothing to forget."""

    def submit(self, token: int, fd: int, buffer: memoryview, offset: int) -> None:
        assert len(self._in_flight) < self.depth
        assert token not in self._in_flight
        self._ring.prepare_read(fd, buffer, offset, token)
        self._in_flight.add(token)
        self._prepared_count += 1

    def flush(self) -> None:
        if self._prepared_count:
            submit_prepared(self._ring.submit, self._prepared_count)
            self._prepared_count = 0

    def reap(self) -> list[tuple[int, int]]:
        ended = [(entry.user_data, entry.res) for entry in self._ring.wait(0)]
        self._in_flight.difference_update(token for token, _ in ended)
        return ended

    def close(self) -> None:
        self._ring.close()
