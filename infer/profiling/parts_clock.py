"""Wall-clock time by part: at each moment one part is running, so the parts add up to the whole."""

import time
from collections.abc import Callable
from typing import Any


def nothing_queued() -> None:
    """A CPU has done what a function did when it returns."""


class PartsClock:
    """Stops at nothing: what no part claims is `rest`. For one thread.

    sealed: parts that keep the time of other parts which run inside them. settle: waits for work
    that a device has queued, so that it counts where it was asked for.
    """

    def __init__(
        self,
        rest: str,
        sealed: frozenset[str] = frozenset(),
        settle: Callable[[], None] = nothing_queued,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.rest = rest
        self._sealed, self._settle, self._clock_s = sealed, settle, clock_s
        self.restart()

    def restart(self) -> None:
        """Forget all, and begin with the rest."""
        self._seconds: dict[str, float] = {}
        self._current = self.rest
        self._since_s = self._clock_s()

    def read(self) -> dict[str, float]:
        """Seconds of each part since `restart`, the longest first."""
        self._enter(self._current)
        return dict(sorted(self._seconds.items(), key=lambda item: -item[1]))

    def timed(
        self, part: str | Callable[..., str], function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The function, whose time is the part's; a callable part is asked with its arguments."""

        def run(*arguments: Any, **keywords: Any) -> Any:
            before = self._current
            if before in self._sealed:
                return function(*arguments, **keywords)
            self._enter(part if isinstance(part, str) else part(*arguments, **keywords))
            try:
                return function(*arguments, **keywords)
            finally:
                self._settle()
                self._enter(before)

        return run

    def _enter(self, part: str) -> None:
        now_s = self._clock_s()
        spent_s = now_s - self._since_s
        self._seconds[self._current] = self._seconds.get(self._current, 0.0) + spent_s
        self._current, self._since_s = part, now_s
