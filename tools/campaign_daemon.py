"""streamd with a drive that can be made to fail, and that looks at its own caches when asked.

The file that CAMPAIGN_DRIVE names holds three numbers: the share of reads that fail, the share that
come short, and the longest delay in milliseconds. It is read again whenever it has changed. Each
question for statistics is answered after `check_integrity` of every tier: a contradiction ends the
daemon with a traceback.
"""

import errno
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from streamd.cli import main
from streamd.daemon import Daemon
from streamd.readers.pread_engine import Job, PreadEngine
from streamd.slot_cache.cache_integrity import check_integrity

ALIGN_BYTES = 4096
# At least a few: what a reader does about each is what is tried.
ERRORS = (errno.EIO, errno.ENODATA, errno.EINTR, errno.EAGAIN)


class Drive:
    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        self._random = random.Random(seed)
        self._read_at_ns = -1
        self._faults = (0.0, 0.0, 0.0)

    def install(self) -> None:
        serve = PreadEngine._serve

        def faulty(engine: PreadEngine, job: Job | None) -> bool:
            if job is None:
                return serve(engine, job)
            error_share, short_share, delay_ms = self._now()
            time.sleep(self._random.random() * delay_ms / 1000)
            token, fd, buffer, offset = job
            if self._random.random() < error_share:
                engine._ended.put((token, -self._random.choice(ERRORS)))
                return True
            if self._random.random() < short_share and len(buffer) > ALIGN_BYTES:
                got = os.preadv(fd, [buffer[:ALIGN_BYTES]], offset)
                engine._ended.put((token, got))
                return True
            return serve(engine, job)

        PreadEngine._serve = faulty

    def _now(self) -> tuple[float, float, float]:
        changed_ns = self._path.stat().st_mtime_ns
        if changed_ns != self._read_at_ns:
            words = self._path.read_text().split()
            if len(words) == 3:  # else it is just being written
                self._faults = tuple(map(float, words))
                self._read_at_ns = changed_ns
        return self._faults


def check_with_statistics() -> None:
    stats = Daemon.stats

    def checked(daemon: Daemon, watching: bool = False) -> dict[str, Any]:
        for tier in daemon.model.tiers.values():
            check_integrity(tier.cache)
        return stats(daemon, watching)

    Daemon.stats = checked


if __name__ == "__main__":
    Drive(Path(os.environ["CAMPAIGN_DRIVE"]), int(os.environ["CAMPAIGN_SEED"])).install()
    check_with_statistics()
    sys.exit(main())
