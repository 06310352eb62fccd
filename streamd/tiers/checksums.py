"""`--verify`: a slab that is read again must be what it was the first time.

Drives, controllers and memory do return wrong bytes without an error now and then. XXH3 (64 bit)
finds that; it does not tell which of the two reads was right.
"""

from collections.abc import Iterable

import numpy as np
import xxhash

from shared.errors import ReadFailed


class SlabChecksums:
    """One sum for each expert, taken when it first comes."""

    def __init__(self, n_layers: int, n_experts: int) -> None:
        self._sums = np.zeros((n_layers, n_experts), np.uint64)
        self._known = np.zeros((n_layers, n_experts), np.bool_)
        self.checked_count = 0

    def check(self, layer: int, expert: int, parts: Iterable[memoryview]) -> ReadFailed | None:
        """Of the payload bytes of gate, up and down; the error if they have changed."""
        digest = xxhash.xxh3_64()
        for part in parts:
            digest.update(part)
        value = np.uint64(digest.intdigest())
        if not self._known[layer, expert]:
            self._known[layer, expert] = True
            self._sums[layer, expert] = value
            return None
        self.checked_count += 1
        if self._sums[layer, expert] == value:
            return None
        return ReadFailed(
            f"expert {expert} of layer {layer} is not what it was when it was first read",
            "check the drive and the memory: streamd scrub --model FILE reads the whole file",
        )
