"""streamd whose main loop hangs, its threads alive, as soon as a file named by $HANG_AT exists."""

import os
import sys
import time
from pathlib import Path

from streamd.cli import main
from streamd.daemon import Daemon

_wait = Daemon._wait


def _wait_or_hang(daemon: Daemon) -> None:
    while Path(os.environ["HANG_AT"]).exists():
        time.sleep(0.1)
    _wait(daemon)


if __name__ == "__main__":
    Daemon._wait = _wait_or_hang
    sys.exit(main())
