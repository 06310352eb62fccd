"""How hot each expert is by what the clients say they have used: their areas' counts, absorbed."""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from streamd.slot_cache.cache_client import CacheClient
from streamd.slot_cache.policy import LfuAgeing

# How old the clients' use counts may be when victims are chosen.
ABSORB_INTERVAL_MS = 5.0


class Heat:
    """A view of a cache's clients, and the policy that their uses feed."""

    def __init__(
        self, key_count: int, clients: Mapping[int, CacheClient], now_ms: Callable[[], float]
    ) -> None:
        self.policy = LfuAgeing(key_count)
        self._clients = clients
        self._now_ms = now_ms
        self._absorbed_at_ms = now_ms()
        self._departed_uses: npt.NDArray[np.uint32] = np.zeros(key_count, np.uint32)

    def refresh(self) -> None:
        """Take in what all clients have used since the last time, if that is a while ago."""
        now_ms = self._now_ms()
        if now_ms - self._absorbed_at_ms >= ABSORB_INTERVAL_MS:
            self._absorbed_at_ms = now_ms
            for client in self._clients.values():
                self.absorb(client)

    def absorb(self, client: CacheClient) -> None:
        uses: npt.NDArray[np.uint32] = client.area.uses.reshape(-1).copy()
        self.policy.absorb(uses - client.absorbed_uses)
        client.absorbed_uses = uses

    def leave(self, client: CacheClient) -> None:
        """A client goes: what it has used stays counted."""
        self.absorb(client)
        self._departed_uses += client.absorbed_uses

    def uses_of(self, key: int) -> int:
        """How often an expert has been used so far, by those that have left too."""
        present = (int(client.area.uses.reshape(-1)[key]) for client in self._clients.values())
        return int(self._departed_uses[key]) + sum(present)
