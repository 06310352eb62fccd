"""What a client does about the end of its daemon: let go of its memory, wait, bind to the next."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from infer.daemon.recovery import Recovery
from shared.errors import DaemonLost

# Daemons that end during one and the same computation; then it is the computation.
MAX_LOSSES = 5

T = TypeVar("T")


class Attachment(Protocol):
    """infer.daemon.client.SlotClient."""

    @property
    def attached(self) -> bool: ...

    def attach(self) -> None: ...

    def detach(self) -> None: ...

    def wait_for_end(self, wake_fd: int) -> bool: ...


class Lifeline:
    """Of one client. Without a `recovery` a lost daemon is an error at once.

    bind: build what lies in the daemon's memory or knows where it lies; unbind: drop all of that,
    from any thread. A daemon that comes back plans with the memory that it finds free, so nothing
    of the dead one's may be kept.
    """

    def __init__(
        self,
        client: Attachment,
        recovery: Recovery | None,
        bind: Callable[[], None],
        unbind: Callable[[], None],
    ) -> None:
        self._client = client
        self._recovery = recovery
        self._bind = bind
        self._unbind = unbind

    def redo_if_lost(self, compute: Callable[[], T]) -> T:
        """`compute()`, and again on the next daemon if this one ends meanwhile.

        It must leave no trace where it fails. Raises DaemonLost when no daemon comes back, and what
        keeps the next one from serving us: ModelChanged, ProtocolMismatch, GpuError, PlanError.
        """
        lost_at_s: float | None = None
        for _ in range(MAX_LOSSES):
            try:
                if not self._client.attached:
                    self._return()
                return compute()
            except DaemonLost as error:
                if self._recovery is None:
                    raise
                lost = _without_frames(error)
            lost_at_s = lost_at_s or time.monotonic()
            self._let_go()
            self._recovery.wait(lost, lost_at_s)
        raise lost

    @contextmanager
    def idle(self) -> Iterator[None]:
        """While nothing is computed: if the daemon ends, its memory is let go of at once."""
        if self._recovery is None or not self._client.attached:
            yield
            return
        wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        watch = threading.Thread(target=self._watch, args=(wake_fd,), daemon=True)
        watch.start()
        try:
            yield
        finally:
            os.eventfd_write(wake_fd, 1)
            watch.join()
            os.close(wake_fd)

    def _watch(self, wake_fd: int) -> None:
        if self._client.wait_for_end(wake_fd):
            self._let_go()

    def _let_go(self) -> None:
        self._unbind()
        self._client.detach()
        gc.collect()

    def _return(self) -> None:
        """Attach to the daemon that has come back, or that had no room for us."""
        self._unbind()
        try:
            self._client.attach()
            self._bind()
        except BaseException:
            self._let_go()
            raise
        if self._recovery is not None:
            self._recovery.tell("the daemon is back: going on")


def _without_frames(error: DaemonLost) -> DaemonLost:
    """The same error without what it was raised from: frames keep the daemon's memory mapped."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
