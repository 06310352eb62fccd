"""Which experts are worth keeping: LFU with ageing.

An expert's heat is the number of times routers chose it (those of long prompts count less:
shared/scan.py), halved again and again as lookups go by, so that what was hot an hour ago makes
room. Heat belongs to the expert, not to its slot: an expert that comes back finds the heat it left
with.

While a prompt goes on, what its layers to come will use is worth keeping too: it is read once a
chunk, layer by layer, so what lies in the layer just passed is needed last (`expect`).
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

# Lookups after which a use counts half, in multiples of the number of experts. By replays of real
# routing (docs/measurements.md, Eviction): below 1 what is hot all day is lost, above 4 what was
# hot in the last conversation stays too long.
HALF_LIFE_ROUNDS = 1.5
# Uses that an expert of a prompt's next layer is worth, and less the farther a layer is. By prompts
# of all lengths (docs/measurements.md, Prompts and the hot set).
SCAN_WORTH = 2.0


class LfuAgeing:
    """Heat of `key_count` experts; pure arithmetic."""

    def __init__(self, key_count: int, half_life_rounds: float = HALF_LIFE_ROUNDS) -> None:
        self.heat: npt.NDArray[np.float32] = np.zeros(key_count, np.float32)
        self._half_life_lookups = max(1, round(half_life_rounds * key_count))
        self._lookup_count = 0.0
        self._expected: npt.NDArray[np.float32] = np.zeros(key_count, np.float32)
        self._expected_of: tuple[int, ...] = ()

    def expect(self, scan_layers: Iterable[int], n_layers: int) -> None:
        """Prompts have reached these layers, of n_layers; key_count is a multiple of that."""
        layers = tuple(scan_layers)
        if layers == self._expected_of:
            return
        self._expected_of = layers
        ahead = (np.arange(n_layers) - np.reshape(layers, (-1, 1))) % n_layers
        worth = SCAN_WORTH * (1 - ahead / n_layers)
        of_layer = worth.max(axis=0, initial=0.0).astype(np.float32)
        self._expected = np.repeat(of_layer, len(self.heat) // n_layers)

    def worth(self, keys: npt.NDArray[np.int32] | int) -> npt.NDArray[np.float32]:
        """What it is worth to keep them, in uses."""
        worth: npt.NDArray[np.float32] = self.heat[keys] + self._expected[keys]
        return worth

    def absorb(self, uses: npt.NDArray[np.uint32] | npt.NDArray[np.float64]) -> None:
        """Count `uses` [key_count] new lookups of each expert, which may be parts of one."""
        new_count = float(uses.sum())
        half_life, before = self._half_life_lookups, self._lookup_count
        # At once: the counts are the clients' word, and may be anything.
        halvings, self._lookup_count = divmod(before + new_count, half_life)
        kept = 0.5**halvings
        self.heat *= np.float32(kept)
        if halvings:
            # Nobody knows their order: they are taken to have come evenly. Counted as if they all
            # had come at first, an hour of hits would weigh less than the minute after it.
            whole = half_life * (1 - 2 * kept)
            share = ((half_life - before) * kept + whole + self._lookup_count) / new_count
            uses = uses * share
        self.heat += uses

    def coldest(self, keys: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.intp]:
        """Positions in `keys` of the `count` coldest, coldest first (ties: the earlier one)."""
        ordered: npt.NDArray[np.intp] = np.argsort(self.worth(keys), kind="stable")[:count]
        return ordered
