"""How hot each expert is by what the clients say they have used: their areas' counts, absorbed."""

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from shared.policy import LfuAgeing
from shared.scan import USE_PARTS
from streamd.slot_cache.cache_client import CacheClient

# How old the clients' use counts may be when victims are chosen.
ABSORB_INTERVAL_MS = 5.0


class Heat:
    """The clients that count their uses, and the policy that these feed.

    scan_layers: asked for the layers that prompts have reached, whichever tier they are computed
    from.
    """

    def __init__(self, key_count: int, n_layers: int, now_ms: Callable[[], float]) -> None:
        self.policy = LfuAgeing(key_count)
        self.scan_layers: Callable[[], Iterable[int]] = tuple
        self._n_layers = n_layers
        self._clients: list[CacheClient] = []
        self._now_ms = now_ms
        self._absorbed_at_ms = now_ms()
        self._departed: npt.NDArray[np.uint32] = np.zeros(key_count, np.uint32)

    def refresh(self) -> None:
        """Take in what all clients have used since the last time, if that is a while ago."""
        now_ms = self._now_ms()
        if now_ms - self._absorbed_at_ms >= ABSORB_INTERVAL_MS:
            self._absorbed_at_ms = now_ms
            for client in self._clients:
                self.absorb(client)
            self.policy.expect(self.scan_layers(), self._n_layers)

    def absorb(self, client: CacheClient) -> None:
        counted = client.area.counted.copy()
        uses, scanned = (counted - client.absorbed).reshape(2, -1)
        self.policy.absorb(uses + scanned / USE_PARTS)
        client.absorbed = counted

    def join(self, client: CacheClient) -> None:
        if client.counts_uses:
            self._clients.append(client)

    def leave(self, client: CacheClient) -> None:
        """A client goes: what it has used stays counted."""
        if not client.counts_uses:
            return
        self._clients.remove(client)
        self.absorb(client)
        self._departed += client.absorbed.sum(axis=0, dtype=np.uint32).reshape(-1)

    def uses_of(self, key: int) -> int:
        """A number that another use of an expert changes, and that who leaves does not change."""
        return int(self._departed[key]) + sum(client.uses_of(key) for client in self._clients)
