"""A daemon that begins where the last one ended: heat out of the hot list, and back into it."""

import logging
import time
from pathlib import Path

from streamd.records.hot_list import HotList
from streamd.served_model import ServedModel

log = logging.getLogger(__name__)

SAVE_INTERVAL_S = 60.0


class WarmStart:
    """Heat that is loaded is what backfill goes by: see streamd/scheduling/backfill.py."""

    def __init__(self, model: ServedModel, path: Path) -> None:
        experts = model.experts
        self._list = HotList(path, model.index.fingerprints, (experts.n_layers, experts.n_experts))
        self._caches = {name: tier.cache for name, tier in model.tiers.items()}
        self._saved_at_s = time.monotonic()
        heats = self._list.load()
        for name, cache in self._caches.items():
            if name in heats:
                cache.heat.policy.heat[:] = heats[name].reshape(-1)
                log.info("%s tier: %d experts are known hot", name, (heats[name] > 0).sum())

    def save_sometimes(self) -> None:
        if time.monotonic() - self._saved_at_s >= SAVE_INTERVAL_S:
            self.save()

    def save(self) -> None:
        """Unless nothing has been used: that is no reason to forget what once was."""
        self._saved_at_s = time.monotonic()
        for cache in self._caches.values():
            cache.heat.refresh()
        heats = {name: cache.heat.policy.heat for name, cache in self._caches.items()}
        if any(heat.any() for heat in heats.values()):
            self._list.save(heats)
