"""streamd, reading with threads, from a drive that answers every read with an error for a while:
for as long as the file that the environment's DRIVE_FAILS names exists.
"""

import errno
import os
import sys
from pathlib import Path

from streamd.cli import main
from streamd.readers.pread_engine import PreadEngine

_reap = PreadEngine.reap


def install(sign: Path) -> None:
    def reap(engine: PreadEngine) -> list[tuple[int, int]]:
        ended = _reap(engine)
        return [(token, -errno.EIO) for token, _ in ended] if sign.exists() else ended

    PreadEngine.reap = reap


if __name__ == "__main__":
    install(Path(os.environ["DRIVE_FAILS"]))
    sys.exit(main())
