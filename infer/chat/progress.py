"""How far a long prompt is, on a terminal."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from torch import Tensor

QUIET_S = 1.0
REFRESH_S = 0.2
_ERASE_LINE = "\r\x1b[K"


class PrefillProgress:
    """A line on a terminal, after a second: tokens, percent, time left; elsewhere nothing.

    A layer of a chunk counts as its share of the chunk's tokens.
    """

    def __init__(
        self,
        n_layers: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """stream: by default stderr, as it is now."""
        self._n_layers = n_layers
        self._stream = stream or sys.stderr
        self._clock = clock
        self._shows = self._stream.isatty()
        self._token_count = 0

    @contextmanager
    def prefill(self, token_count: int) -> Iterator[None]:
        """While so many tokens are computed; the line is gone afterwards."""
        self._token_count = token_count
        self._done_count = 0
        self._started_s = self._clock()
        self._next_s = self._started_s + QUIET_S
        self._shown = False
        try:
            yield
        finally:
            self._token_count = 0
            if self._shown:
                self._stream.write(_ERASE_LINE)
                self._stream.flush()

    def tap(self, name: str, values: Tensor) -> None:
        """Sees what the model tells while it computes (blocks.moe.Tap)."""
        if not self._token_count or not name.startswith("hidden."):
            return
        layer, chunk_count = int(name.removeprefix("hidden.")), len(values)
        if layer == self._n_layers:
            self._done_count += chunk_count
            layer = chunk_count = 0
        now_s = self._clock()
        if self._shows and now_s >= self._next_s:
            self._next_s = now_s + REFRESH_S
            self._show(self._done_count + chunk_count * layer / self._n_layers, now_s)

    def _show(self, done_count: float, now_s: float) -> None:
        share = min(1.0, done_count / self._token_count)
        line = f"{done_count:.0f} of {self._token_count} prompt tokens, {share:.0%}"
        if share > 0:
            left_s = (now_s - self._started_s) * (1 - share) / share
            line += f", {left_s:.0f} s left"
        self._stream.write(_ERASE_LINE + line)
        self._stream.flush()
        self._shown = True
