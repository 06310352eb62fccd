"""streamd, reading with threads, from a drive that goes bad: it flips a bit and reports no error.

The environment's SOUND_READS says how many reads are right before that.
"""

import os
import sys

from streamd.cli import main
from streamd.readers.pread_engine import PreadEngine

_submit, _reap = PreadEngine.submit, PreadEngine.reap


class BadDrive:
    def __init__(self, sound_count: int) -> None:
        self.left = sound_count
        self.buffers: dict[int, memoryview] = {}

    def install(self) -> None:
        def submit(engine: PreadEngine, token: int, fd: int, buffer: memoryview, at: int) -> None:
            self.buffers[token] = buffer
            _submit(engine, token, fd, buffer, at)

        def reap(engine: PreadEngine) -> list[tuple[int, int]]:
            ended = _reap(engine)
            for token, _ in ended:
                buffer = self.buffers.pop(token)
                self.left -= 1
                if self.left < 0:
                    buffer[len(buffer) // 2] ^= 1
            return ended

        PreadEngine.submit, PreadEngine.reap = submit, reap


if __name__ == "__main__":
    BadDrive(int(os.environ["SOUND_READS"])).install()
    sys.exit(main())
