"""Telling the service manager how we are (sd_notify): datagrams of NAME=VALUE lines.

    READY=1      the model is loaded, clients may come
    STATUS=...   one line for `systemctl status`
    STOPPING=1   RELOADING=1 and MONOTONIC_USEC=...
    WATCHDOG=1   the main loop turns; without one for WatchdogSec the daemon is killed and restarted

$NOTIFY_SOCKET names the socket: a path, or `@name` in the abstract namespace. Without it nothing is
said. Nothing here waits or fails: a manager that has gone must not take the daemon with it.
"""

import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

# The manager wants to hear within WATCHDOG_USEC; this share of it leaves room for a slow turn.
WATCHDOG_SHARE = 0.25


class Notifier:
    """`alive` belongs into the main loop and nowhere else: a thread would feed a hung daemon."""

    def __init__(
        self,
        environment: Mapping[str, str] = os.environ,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now_s = now_s
        self._address = re.sub("^@", "\0", environment.get("NOTIFY_SOCKET", ""))
        self._interval_s = _watchdog_s(environment) * WATCHDOG_SHARE
        self._fed_at_s = now_s()

    def ready(self, status: str) -> None:
        self._send("READY=1", f"STATUS={status}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={status}")

    def reloading(self) -> None:
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def alive(self) -> None:
        """Feed the watchdog where there is one and it is time to."""
        if not self._interval_s:
            return
        now_s = self._now_s()
        if now_s - self._fed_at_s >= self._interval_s:
            self._fed_at_s = now_s
            self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        with (
            suppress(OSError),
            socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            ) as sender,
        ):
            sender.sendto("\n".join(lines).encode(), self._address)


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """How often the manager wants to hear of this process; 0: never."""
    usec, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or (pid and pid != str(os.getpid())):
        return 0.0
    return int(usec) / 1e6
