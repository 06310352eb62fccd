"""The file of the model that is served: is it still the one that was opened, could it be again?"""

import time
from collections.abc import Callable
from pathlib import Path

from shared.errors import ModelChanged
from shared.experts import ExpertIndex
from shared.fingerprint import RELOAD
from shared.gguf_index import GgufIndex
from shared.mtp import open_served

INTERVAL_S = 1.0


class ModelWatch:
    """Looks at an opened model's files by their names, so that a replaced one shows too.

    fault: why nothing is served any more, once a file has turned out to be another one.
    """

    def __init__(self, index: GgufIndex, clock: Callable[[], float] = time.monotonic) -> None:
        self.fault: ModelChanged | None = None
        self._index = index
        self._clock = clock
        self._looked_at_s = clock()

    def look(self) -> ModelChanged | None:
        """What has become of the file, looked at once in a while; None if nothing new."""
        now_s = self._clock()
        if self.fault is not None or now_s - self._looked_at_s < INTERVAL_S:
            return None
        self._looked_at_s = now_s
        try:
            self._index.check_unchanged()
        except ModelChanged as error:
            return error
        return None

    def check_client(self, shards: list[list[int]]) -> None:
        """ModelChanged for a client that has opened something else, and for all after a fault."""
        if self.fault is not None:
            raise ModelChanged(self.fault.message, self.fault.remedy)
        if shards != [list(shard) for shard in self._index.fingerprints]:
            raise ModelChanged(
                f"{self._index.paths[0]} is not the file that the daemon has opened", RELOAD
            )


def check_opens(model: Path, mtp: str) -> None:
    """Raise the ModelError that opening the file now would end with; only its head is read."""
    ExpertIndex.from_gguf(open_served(model, mtp))
