"""Copies from memory that is not pinned, by way of a ring of pinned pieces."""

import ctypes

from infer.uploads.device import UploadDevice
from shared.device_copies import Copy

# The host fills one piece while others are on the bus.
PIECE_COUNT = 4
PIECE_BYTES = 4 << 20


class BounceRing:
    """A source may change as soon as `copy` has returned."""

    def __init__(self, device: UploadDevice, piece_bytes: int = PIECE_BYTES) -> None:
        self._device = device
        self._piece_bytes = piece_bytes
        start = device.allocate_pinned(PIECE_COUNT * piece_bytes)
        self._pieces = [start + number * piece_bytes for number in range(PIECE_COUNT)]
        self._copied = [device.event() for _ in range(PIECE_COUNT)]
        self._turn = 0

    def copy(self, copy: Copy) -> None:
        """Queue it; a piece is filled again when the GPU has taken what it held."""
        for first in range(0, copy.size_bytes, self._piece_bytes):
            size_bytes = min(self._piece_bytes, copy.size_bytes - first)
            turn, self._turn = self._turn, (self._turn + 1) % PIECE_COUNT
            piece, copied = self._pieces[turn], self._copied[turn]
            copied.synchronize()
            ctypes.memmove(piece, copy.source + first, size_bytes)
            self._device.copy(Copy(copy.target + first, piece, size_bytes))
            copied.record(self._device.copying)
