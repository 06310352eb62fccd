"""Slabs that have arrived, or will not: the table names them, and who waits is told."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from shared.errors import ModelChanged, StreamError
from shared.wire import Failed
from streamd.scheduling.scheduler import Scheduler
from streamd.served_model import ServedModel
from streamd.sessions import Sessions

log = logging.getLogger(__name__)


class Arrived(NamedTuple):
    """How many slabs have come, or will not; `changed`: the file turned out to be another one."""

    slab_count: int
    changed: ModelChanged | None


class Arrivals:
    """tell: sends a message to the client with a ticket."""

    def __init__(
        self, model: ServedModel, sessions: Sessions, tell: Callable[[int, Failed], None]
    ) -> None:
        self._model = model
        self._sessions = sessions
        self._tell = tell

    def take(self) -> Arrived:
        """Publish what has arrived since."""
        changed = None
        ring: set[int] = set()  # once for all that has come
        completions = self._model.tier.poll()
        for completion in completions:
            slot = completion.key
            assert isinstance(slot, int)
            error = self._model.tier.arrived(slot, completion.error)
            ring.update(self._settle(self._model.scheduler, slot, error))
            if isinstance(error, ModelChanged):
                changed = error
        count = len(completions)
        if self._model.gpu is not None:
            uploads = self._model.gpu.uploads.poll()
            count += len(uploads)
            for uploaded in uploads:
                ring.update(self._settle(self._model.gpu.scheduler, uploaded.slot, uploaded.error))
        self._sessions.ring(ring)
        return Arrived(count, changed)

    def _settle(self, scheduler: Scheduler, slot: int, error: StreamError | None) -> list[int]:
        """The clients to ring; those for whom it will not come are told here."""
        if error is None:
            return scheduler.landed(slot)
        layer, expert, asked = scheduler.failed(slot)
        # What was only hinted is nobody's loss yet: it is said when somebody asks for it.
        matters = bool(asked) or isinstance(error, ModelChanged)
        log.log(logging.ERROR if matters else logging.DEBUG, "%s", error)
        for number, section in asked:
            if scheduler.cache.clients[number].ours:
                assert self._model.gpu is not None
                self._model.gpu.uploads.fetch_failed(number, section, error)
            else:
                failed = Failed(section, layer, expert, error.code, error.message, error.remedy)
                self._tell(self._sessions.of_number(number).ticket, failed)
        return []
