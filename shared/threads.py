"""Threads, or why there can be none, and how exactly they sleep."""

import ctypes
import threading

from shared.errors import ConfigError

_PR_SET_TIMERSLACK = 29
_FINE_NS = 1000


def start_thread(thread: threading.Thread) -> None:
    """ConfigError where the system refuses one: it has no memory for its stack, or too many run."""
    try:
        thread.start()
    except RuntimeError as error:
        raise ConfigError(
            f"cannot start the thread {thread.name!r}: {error}",
            "raise the limits on address space and threads (ulimit -v, ulimit -u), or end other"
            " programs",
        ) from error


def sleep_exactly() -> None:
    """Let this thread sleep to the microsecond: by default Linux may add 50 to what it asks for.

    A sandbox may refuse; then it sleeps longer.
    """
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_FINE_NS), 0, 0, 0)
