"""A daemon of our own, for when none serves the model: it ends when we do, however we end."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

from shared.daemon_options import DaemonOptions
from shared.errors import DaemonLost, from_wire

START_DEADLINE_S = 600.0
STOP_DEADLINE_S = 5.0


class EmbeddedDaemon:
    """Starts `streamd` at once; `wait_ready` waits until it serves; `start_again` after its end.

    `close` is due in any case. The daemon holds the other end of a pipe of ours, which the kernel
    closes with us: no orphan is left even after SIGKILL. It is in a session of its own, so Ctrl-C
    in our terminal does not reach it.
    """

    def __init__(self, model: Path, options: DaemonOptions, name: str) -> None:
        self.name = name
        self._words = ("--model", str(model), "--name", name, *options.arguments())
        self._start()

    def start_again(self) -> None:
        """In place of one that has died, or hangs; waits until it serves."""
        os.close(self._owner_write)
        self._process.kill()
        self._process.wait()
        self._start()
        self.wait_ready()

    def _start(self) -> None:
        self._serves = False
        owner_read, self._owner_write = os.pipe()
        self._ready_read, ready_write = os.pipe()
        command = [
            *(sys.executable, "-m", "streamd", "serve", "--log-level", "warning", *self._words),
            *("--owner-fd", str(owner_read), "--ready-fd", str(ready_write)),
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(owner_read, ready_write),
            start_new_session=True,
        )
        os.close(owner_read)
        os.close(ready_write)

    def wait_ready(self) -> None:
        """Raises the daemon's own reason when it cannot serve."""
        readable, _, _ = select.select([self._ready_read], [], [], START_DEADLINE_S)
        line = os.read(self._ready_read, 1 << 16) if readable else b""
        os.close(self._ready_read)
        if line:
            word = json.loads(line)
            if "error" in word:
                raise from_wire(*word["error"])
            self._serves = True
        elif readable:
            raise DaemonLost(
                f"the daemon that was started has ended: exit code {self._process.wait()}",
                "see its messages above",
            )
        else:
            raise DaemonLost(
                f"the daemon that was started does not serve after {START_DEADLINE_S:g} s",
                "see its messages above",
            )

    def close(self) -> None:
        """Let the daemon end, and wait for it; one that others have attached to ends with them."""
        os.close(self._owner_write)
        try:
            self._process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            if not self._serves:
                self._process.kill()
                self._process.wait()
