"""Says on a terminal what is being loaded, when that takes longer than a moment."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

QUIET_S = 0.5


@contextmanager
def loading_notice(
    model: str, stream: TextIO | None = None, quiet_s: float = QUIET_S
) -> Iterator[None]:
    """A line on a terminal while the block runs, if it runs longer than `quiet_s`; elsewhere
    nothing. A thread of its own writes it: what loads has no place to look at the clock.

    stream: by default stderr, as it is now.
    """
    stream = stream or sys.stderr
    if not stream.isatty():
        yield
        return
    timer = threading.Timer(quiet_s, _write, (stream, f"loading {model} ...\n"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _write(stream: TextIO, line: str) -> None:
    stream.write(line)
    stream.flush()
