"""The host tier within the memory that the machine can spare: slots closed, pages given back."""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shared.arena import slot_bytes
from shared.errors import GpuError
from shared.free_memory import available_memory_bytes
from shared.sizes import size_text
from shared.slots import SlotState
from streamd.planning.plan import HostPlan
from streamd.slot_cache.cache import HostCache
from streamd.slot_cache.slot_limits import close_slots, open_slots
from streamd.tiers.governor import Governor
from streamd.tiers.host_tier import HostTier

if TYPE_CHECKING:
    from streamd.served_model import ServedModel

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
# Slots whose pages are given back in one turn of the main loop: 5 MB of 4 KiB pages take 1 ms.
MAX_GIVEN_BACK = 4


def governor_of(model: "ServedModel") -> "HostGovernor":
    unpin = model.gpu.source.unpin if model.gpu is not None else None
    return HostGovernor(model.plan, model.cache, model.tier, unpin, available_memory_bytes)


class HostGovernor:
    """unpin: lets a host slot go that was pinned for copies to a GPU, if there is one.

    available: bytes of memory that can be had now.
    """

    def __init__(
        self,
        plan: HostPlan,
        cache: HostCache,
        tier: HostTier,
        unpin: Callable[[int], None] | None,
        available: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        full_bytes = plan.layout.total_bytes
        floor_bytes = min(plan.floor_bytes, full_bytes)
        self._policy = Governor(floor_bytes, full_bytes, plan.available_bytes)
        self._layout = plan.layout
        self._cache = cache
        self._tier = tier
        self._unpin = unpin
        self._available = available
        self._clock = clock
        self._looked_at_s = clock()
        self._closed: list[int] = []  # with pages yet
        self._works = True

    @property
    def busy(self) -> bool:
        """Whether `tick` has something left to do."""
        return bool(self._closed)

    def tick(self) -> None:
        """Called again and again; looks at the machine once in a while.

        Once memory could not be given back it does nothing more: slots stay as they are.
        """
        if not self._works:
            return
        try:
            self._give_back_some()
        except (GpuError, OSError) as error:
            log.error("memory cannot be given back, and will not be any more: %s", error)
            self._works, self._closed = False, []
            return
        now_s = self._clock()
        if now_s - self._looked_at_s < INTERVAL_S:
            return
        self._looked_at_s = now_s
        before_bytes = self._policy.limit_bytes
        limit_bytes = self._policy.look(self._available(), self._tier.held_bytes, now_s)
        if limit_bytes != before_bytes:
            log.info("host cache: %s, as memory allows", size_text(limit_bytes))
        share = self._share_of(limit_bytes)
        for slots in self._cache.classes:
            surplus_count = slots.usable_count - round(share * slots.count)
            if surplus_count > 0:
                close_slots(self._cache, slots, surplus_count)
            elif surplus_count < 0:
                open_slots(slots, -surplus_count)
            elif slots.leaving:
                self._cache.reclaim()
        classes = self._cache.classes
        self._closed = [s for slots in classes for s in slots.closed if self._tier.has_pages(s)]

    def _give_back_some(self) -> None:
        for _ in range(min(MAX_GIVEN_BACK, len(self._closed))):
            slot = self._closed.pop()
            if self._cache.class_of_slot(slot).state_of(slot) == SlotState.CLOSED:
                if self._unpin is not None:
                    self._unpin(slot)
                self._tier.give_back(slot)

    def _share_of(self, limit_bytes: int) -> float:
        """Of the slots of those classes that may have fewer; the others keep theirs."""
        sizes = [slot_bytes(parts, self._layout.align) for parts in self._layout.class_part_bytes]
        class_bytes = [
            slots.count * size for slots, size in zip(self._cache.classes, sizes, strict=True)
        ]
        fixed_bytes = sum(
            size
            for size, slots in zip(class_bytes, self._cache.classes, strict=True)
            if slots.holds_all
        )
        open_bytes = sum(class_bytes) - fixed_bytes
        return max(0, limit_bytes - fixed_bytes) / open_bytes if open_bytes else 1.0
