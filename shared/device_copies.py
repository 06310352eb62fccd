"""Copies from host memory to a GPU's, and the host slots they come from, pinned one by one."""

import logging
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shared.errors import GpuError

log = logging.getLogger(__name__)


class Copy(NamedTuple):
    """`size_bytes` from a host address to a device address."""

    target: int
    source: int
    size_bytes: int


class Pinning(Protocol):
    """A GPU, as far as it locks host memory."""

    def pin(self, address: int, size_bytes: int) -> bool: ...

    def unpin(self, address: int) -> None: ...


class PinnedSlots:
    """Slots are pinned when one is first used, so that no copy crosses from one pinned range into
    the next. Their pages are there by then, since a slab has been read into them.

    stretches: addresses and sizes of each slot's parts, int64 [slots, parts, 2]; refusal: what is
    logged when the driver pins no more, after which none is tried.
    """

    def __init__(self, device: Pinning, stretches: npt.NDArray[np.int64], refusal: str) -> None:
        self._device = device
        self._stretches = stretches
        self._refusal = refusal
        self._pinned = [False] * len(stretches)
        self._refused = False

    def pin(self, slot: int) -> bool:
        """Whether it is pinned, by now or before."""
        if not (self._pinned[slot] or self._refused):
            self._pin(slot)
        return self._pinned[slot]

    def _pin(self, slot: int) -> None:
        first, last = self._stretches[slot, 0].tolist(), self._stretches[slot, -1].tolist()
        try:
            self._pinned[slot] = self._device.pin(first[0], sum(last) - first[0])
        except BaseException:  # Ctrl-C: nobody would know that it is pinned
            self._pinned[slot] = False
            with suppress(GpuError):  # or it is not
                self._device.unpin(first[0])
            raise
        if not self._pinned[slot]:
            self._refused = True
            log.warning("%s", self._refusal)

    def unpin(self, slot: int) -> None:
        """Let a slot go, if it is pinned."""
        if self._pinned[slot]:
            self._device.unpin(int(self._stretches[slot, 0, 0]))
            self._pinned[slot] = False

    def close(self) -> None:
        """No copy is under way any more, and none comes."""
        for slot in range(len(self._pinned)):
            with suppress(GpuError):  # after a fatal one the driver lets nothing go
                self.unpin(slot)
        self._pinned = [False] * len(self._pinned)
        self._refused = True
