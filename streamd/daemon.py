"""The daemon: the main loop, and what it does about each message."""

import logging
import os
import signal
import time
from contextlib import ExitStack
from typing import Any

from shared.errors import NoGpuTier, RequestError, StreamError
from shared.runtime_dir import Endpoints
from shared.threads import sleep_exactly
from shared.wire import (
    Attach,
    Attached,
    Fetch,
    HeatRequest,
    Hint,
    Message,
    Reload,
    Stats,
    StatsRequest,
    Stop,
    Stopping,
)
from streamd.config import StreamdConfig
from streamd.control import Control
from streamd.gpu.cuda_device import CudaDevice
from streamd.model_watch import ModelWatch, check_opens
from streamd.monitoring.notify import Notifier
from streamd.monitoring.stats import SinceLast, heat_values, model_values
from streamd.records.records import Records
from streamd.scheduling.arrivals import Arrivals
from streamd.served_model import ServedModel, now_ms
from streamd.serving import Serving
from streamd.sessions import Sessions
from streamd.tiers.gpu_tier import OpenGpu
from streamd.tiers.host_governor import governor_of

log = logging.getLogger(__name__)

# While a request waits for a slot, or memory is given back bit by bit, we look this often.
WAITING_POLL_MS = 1
IDLE_POLL_MS = 1000
# Turns in a row for those who wait, before one for what has time.
MAX_URGENT_TURNS = 8
# How often at the most what has nothing to do with requests is seen to.
TEND_INTERVAL_MS = 1.0
# While copies to the GPU are under way, they are looked at this often: see streamd.gpu.device.
COPY_POLL_S = 50e-6


class Daemon:
    """Use as a context manager; `run` serves until it is told to stop."""

    def __init__(
        self,
        config: StreamdConfig,
        endpoints: Endpoints,
        open_device: OpenGpu = CudaDevice,
        notifier: Notifier | None = None,
    ) -> None:
        self.config = config
        self.endpoints = endpoints
        self._open_device = open_device
        self._notifier = notifier or Notifier({})
        self.stopping = False
        self.reload_wanted = False
        self._started_s = time.monotonic()
        self._since_last = SinceLast()
        self._urgent_turns = 0  # since the last one for what has time
        self._tend_at_ms = 0.0
        self._owner_fd: int | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stack = ExitStack()

    def __enter__(self) -> "Daemon":
        with ExitStack() as stack:
            self.model = ServedModel(self.config, stack, self._stop_loading, self._open_device)
            self.sessions = Sessions(self.model.table.shape)
            stack.callback(self.sessions.close)
            for tier in self.model.tiers.values():
                tier.cache.heat.scan_layers = self.sessions.scan_layers
            self._governor = governor_of(self.model) if self.config.governor else None
            self._watch = ModelWatch(self.model.index)
            self._records = Records(self.config, self.model)
            stack.callback(self._records.close)  # when all clients have been detached
            self._control = Control(self.endpoints, self)
            stack.callback(self._control.close)
            arrivals = Arrivals(self.model, self.sessions, self._control.tell)
            self._serving = Serving(
                self.model, self.sessions, self._watch, arrivals, self.config.stall_deadline_ms
            )
            # Every turn takes what has ended.
            self._control.watch(self.model.reader.fileno(), lambda: None)
            self._control.watch(self.model.tier.fileno(), lambda: None)
            self._control.watch(self._wake_fd, self._silence)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stack.close()
        wake_fd, self._wake_fd = self._wake_fd, -1  # signals may come yet
        os.close(wake_fd)

    # The main loop

    def run(self) -> None:
        """Serve until a stop message, a signal, or the end of an embedded daemon's owner."""
        sleep_exactly()
        while not self.stopping:
            self._wait()
            # Whoever waits goes first: the rest waits for a turn in which nobody does.
            if self._serving.serve() and self._urgent_turns < MAX_URGENT_TURNS:
                self._urgent_turns += 1
                continue
            self._urgent_turns = 0
            self._serving.look_ahead()
            self._tend()

    def _tend(self) -> None:
        """See to what has time, however often the loop turns."""
        moment_ms = now_ms()
        if moment_ms < self._tend_at_ms:
            return
        self._tend_at_ms = moment_ms + TEND_INTERVAL_MS
        self.model.tell_drive_time()
        self._serving.revoke_stalled()
        self._serving.watch_model()
        if self._governor:
            self._governor.tick()
        self._records.take(self.sessions)
        self._notifier.alive()

    def _wait(self) -> None:
        """Until something has happened, or may have without telling."""
        if self.model.gpu is not None and self.model.gpu.is_busy():
            self._control.nap(0 if self._urgent_turns else COPY_POLL_S)
            return
        self._serving.look_soon()
        if self._urgent_turns:
            self._control.poll(0)
        else:
            waiting = any(tier.scheduler.waiting for tier in self.model.tiers.values())
            waiting = waiting or (self._governor is not None and self._governor.busy)
            idle_ms = self._records.poll_ms(IDLE_POLL_MS)
            self._control.poll(WAITING_POLL_MS if waiting else idle_ms)

    # Handler of streamd.control

    def attach(self, message: Attach) -> tuple[Attached, list[int]]:
        model = self.model
        self._watch.check_client(message.shards)
        tier = model.tiers.get(message.tier)
        if tier is None:
            raise model.gpu_refusal or NoGpuTier(
                f"the daemon has no {message.tier} tier",
                "restart it with --gpu-cache auto, or compute with --device cpu",
            )
        session = self.sessions.prepare(message.pid, message.tier)
        try:
            tier.scheduler.attach(session.number, session.area)
        except Exception:
            session.close()
            raise
        self.sessions.add(session)
        log.info(
            "client %d has come (pid %d) for the %s tier", session.number, session.pid, session.tier
        )
        self._tell_status()
        attached = tier.attached(session, model.experts)
        own_fds = (model.table_region.fd, session.region.fd)
        return attached, [*own_fds, *tier.descriptors, session.doorbell.fileno()]

    def detach(self, ticket: int) -> None:
        session = self.sessions.remove(ticket)
        self._records.forget(session)
        if not session.revoked:
            scheduler = self.model.tiers[session.tier].scheduler
            scheduler.forget(session.number)
            scheduler.cache.detach(session.number)
        session.close()
        log.info("client %d has left (pid %d)", session.number, session.pid)
        self._tell_status()
        self._stop_if_orphaned()

    def _tell_status(self) -> None:
        self._notifier.status(f"serving {self.config.model.name}, clients: {len(self.sessions)}")

    def request(self, message: Message) -> Message | None:
        self._serving.look_soon()
        match message:
            case Fetch(ticket, section, layer, experts):
                session = self.sessions.of_ticket(ticket)
                scheduler = self.model.tiers[session.tier].scheduler
                scheduler.fetch(session.number, section, layer, experts)
                return None
            case Hint(ticket, section, layer, experts, upload_count):
                if (client := self.sessions.find(ticket)) is not None:
                    hint = self.model.tiers[client.tier].scheduler.hint
                    hint(client.number, client.area, section, layer, experts, upload_count)
                return None
            case StatsRequest(watching):
                return Stats(self.stats(watching))
            case HeatRequest():
                return heat_values(self.model)
            case Reload():
                self._reload()
                return Stopping(os.getpid())
            case Stop():
                self._stop(reload=False)
                return Stopping(os.getpid())
        raise RequestError(f"{type(message).__name__} is not a request")

    def stats(self, watching: bool = False) -> dict[str, Any]:
        uptime_s = round(time.monotonic() - self._started_s, 3)
        return {
            "name": self.config.daemon_name,
            "model": str(self.config.model),
            "pid": os.getpid(),
            "uptime_s": uptime_s,
            "fault": str(self._watch.fault) if self._watch.fault else None,
            "trace": self._records.trace_values(),
            **model_values(self.model, self.sessions, self._since_last, uptime_s, watching),
        }

    # Ending

    def stop_on_signals(self) -> None:
        """SIGTERM and SIGINT end the main loop (and a load) cleanly; SIGHUP to open it anew."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGHUP, self._on_signal)

    def _on_signal(self, signum: int, _frame: object) -> None:
        log.info("%s", signal.Signals(signum).name)
        if signum == signal.SIGHUP:
            try:
                self._reload()
            except StreamError as error:
                log.error("not reloaded: %s", error)
        else:
            self._stop(reload=False)
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)  # the main loop may be waiting

    def _silence(self) -> None:
        """A signal has woken the main loop, and may not have ended it."""
        os.eventfd_read(self._wake_fd)

    def _stop_loading(self) -> bool:
        """Asked at every turn of the loop that loads; it must turn as the main loop must."""
        self._notifier.alive()
        return self.stopping

    def _reload(self) -> None:
        """ModelError, and all goes on as it is, where the file would not open."""
        check_opens(self.config.model, self.config.mtp)
        log.info("reloading %s", self.config.model)
        self._stop(reload=True)

    def _stop(self, reload: bool) -> None:
        """A stop outweighs a reload, whichever comes first."""
        self.reload_wanted = reload and (self.reload_wanted or not self.stopping)
        self.stopping = True

    def watch_owner(self, fd: int) -> None:
        """An embedded daemon ends once its owner has closed `fd` and no client is left."""
        self._owner_fd = fd
        self._control.watch(fd, self._owner_has_gone)

    def _owner_has_gone(self) -> None:
        assert self._owner_fd is not None
        self._control.unwatch(self._owner_fd)
        os.close(self._owner_fd)
        self._owner_fd = -1
        self._stop_if_orphaned()

    @property
    def orphaned(self) -> bool:
        """Whether it was embedded and its owner has gone."""
        return self._owner_fd == -1

    def _stop_if_orphaned(self) -> None:
        if self.orphaned and not self.sessions:
            self.stopping = True
