"""Threads, or why there can be none."""

import threading

from shared.errors import ConfigError


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
