"""The limit on open files: some descriptors always stay free.

ZeroMQ ends the whole process when it finds none left for a connection, and connections come when
others want. So clients are turned away while there are still some.
"""

import os
import resource
from contextlib import suppress

from shared.errors import DaemonBusy

# Connections of commands that only ask something, and files that are open for a moment.
RESERVE_COUNT = 32


def raise_limit() -> None:
    """Allow this process as many open files as the system lets it have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_left() -> None:
    """DaemonBusy if one more client would leave fewer than the reserve."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        open_count = len(os.listdir("/proc/self/fd"))
    except OSError:  # not even one is left to look with
        open_count = limit
    if open_count + RESERVE_COUNT > limit:
        raise DaemonBusy(
            f"the daemon has {open_count} of the {limit} files open that it may have",
            "raise its limit on open files (ulimit -n), or end other clients",
        )
