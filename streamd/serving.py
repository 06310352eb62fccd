"""What the main loop does for the clients, piece by piece, the most urgent first."""

import logging

from shared.errors import ModelChanged
from streamd.model_watch import ModelWatch
from streamd.scheduling.arrivals import Arrivals
from streamd.scheduling.scheduler import Scheduler
from streamd.served_model import ServedModel, now_ms
from streamd.sessions import Session, Sessions
from streamd.slot_cache.stalls import stalled_clients

log = logging.getLogger(__name__)

# While the loop turns without pause, what has time is looked at so often, sooner if anything has
# happened.
LOOK_INTERVAL_MS = 0.5


class Serving:
    """Slots and slabs for the sessions of a model; stall_deadline_ms: see `revoke_stalled`."""

    def __init__(
        self,
        model: ServedModel,
        sessions: Sessions,
        watch: ModelWatch,
        arrivals: Arrivals,
        stall_deadline_ms: int,
    ) -> None:
        self._model = model
        self._sessions = sessions
        self._watch = watch
        self._arrivals = arrivals
        self._stall_deadline_ms = stall_deadline_ms
        self._look_at_ms = 0.0

    def serve(self) -> bool:
        """Do what is waited for; whether there was anything."""
        arrived = self._take_arrivals()
        granted = self._grant()
        if self._model.gpu is not None:
            self._model.gpu.uploads.go_on()
        if arrived or granted:
            self.look_soon()
        return arrived or granted

    def look_soon(self) -> None:
        """Something has happened: the next `look_ahead` looks."""
        self._look_at_ms = 0.0

    def look_ahead(self) -> None:
        """Do what is hinted, and what an idle machine may: if anything has happened, or has had
        time to."""
        moment_ms = now_ms()
        if moment_ms < self._look_at_ms:
            return
        self._look_at_ms = moment_ms + LOOK_INTERVAL_MS
        for tier in self._model.tiers.values():
            self._sessions.ring(tier.scheduler.step())
            self.serve()  # what has come meanwhile must not wait for the other tier

    def _take_arrivals(self) -> bool:
        """Whether anything has arrived, or will not."""
        arrived = self._arrivals.take()
        if arrived.changed is not None:
            self.fail_closed(arrived.changed)
        return arrived.slab_count > 0

    def _grant(self) -> bool:
        """One step of the protocol: slots for those who wait, and slabs into them; whether that
        has ended a wait."""
        granted = False
        if (gpu := self._model.gpu) is not None:
            granted = self._grant_of(gpu.scheduler)
            gpu.uploads.enter_lanes()  # what has to be read for them is asked for at once
        return self._grant_of(self._model.scheduler) or granted

    def _grant_of(self, scheduler: Scheduler) -> bool:
        if not scheduler.cache.waiting:
            return False
        self._sessions.ring(scheduler.serve())
        return not scheduler.cache.waiting

    # Whom nothing more is done for

    def watch_model(self) -> None:
        """Look at the file, once in a while."""
        if (changed := self._watch.look()) is not None:
            log.error("%s", changed)
            self.fail_closed(changed)

    def fail_closed(self, error: ModelChanged) -> None:
        """Serve nothing more of a file that is another one now: old and new do not mix."""
        self._watch.fault = error
        for tier in self._model.tiers.values():
            tier.scheduler.backfill.stopped = True
        for session in self._sessions:
            if not session.revoked:
                self._revoke(session)

    def revoke_stalled(self) -> None:
        """Stop waiting for those who have held up others for so long."""
        for tier in self._model.tiers.values():
            for number in stalled_clients(tier.cache, now_ms(), self._stall_deadline_ms):
                session = self._sessions.of_number(number)
                log.warning("client %d (pid %d) holds up another one: revoked", number, session.pid)
                self._revoke(session)

    def _revoke(self, session: Session) -> None:
        session.revoked = True
        scheduler = self._model.tiers[session.tier].scheduler
        scheduler.forget(session.number)
        scheduler.cache.revoke(session.number)
        session.ring()  # it may be waiting
