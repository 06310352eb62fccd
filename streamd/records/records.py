"""What a daemon writes down of its clients' choices: the hot list, and a trace if it is asked."""

import time
from collections.abc import Iterable

from streamd.config import StreamdConfig
from streamd.records.trace import Tracer
from streamd.records.warm_start import WarmStart
from streamd.served_model import ServedModel
from streamd.sessions import Session

# Rings are emptied at least so often: they hold a hundred tokens of the largest models.
TRACE_INTERVAL_MS = 100


class Records:
    def __init__(self, config: StreamdConfig, model: ServedModel) -> None:
        self._warm_start = WarmStart(model, config.model) if config.warm else None
        self._tracer: Tracer | None = None
        if config.trace is not None:
            self._tracer = Tracer(config.trace, config.model, model.experts)
            model.table.tracing = True
        self._taken_at_s = time.monotonic()

    def poll_ms(self, idle_ms: int) -> int:
        """How long the main loop may sleep that would sleep for `idle_ms`."""
        return idle_ms if self._tracer is None else min(idle_ms, TRACE_INTERVAL_MS)

    def take(self, sessions: Iterable[Session]) -> None:
        """Once a turn of the main loop."""
        if self._warm_start is not None:
            self._warm_start.save_sometimes()
        now_s = time.monotonic()
        if self._tracer is not None and now_s - self._taken_at_s >= TRACE_INTERVAL_MS / 2000:
            self._taken_at_s = now_s
            self._tracer.take((session.number, session.area) for session in sessions)

    def forget(self, session: Session) -> None:
        """A client has gone."""
        if self._tracer is not None:
            self._tracer.forget(session.number, session.area)

    def trace_values(self) -> dict[str, str | int] | None:
        return None if self._tracer is None else self._tracer.values()

    def close(self) -> None:
        if self._warm_start is not None:
            self._warm_start.save()
        if self._tracer is not None:
            self._tracer.close()
