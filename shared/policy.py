"""Which experts are worth keeping: LFU with ageing.

An expert's heat is the number of times routers chose it (those of long prompts count less:
shared/scan.py), halved again and again as lookups go by, so that what was hot an hour ago makes
room. Heat belongs to the expert, not to its slot: an expert that comes back finds the heat it left
with.
"""

import numpy as np
import numpy.typing as npt

# Lookups after which a use counts half, in multiples of the number of experts. By replays of real
# routing (docs/measurements.md, Eviction): below 1 what is hot all day is lost, above 4 what was
# hot in the last conversation stays too long.
HALF_LIFE_ROUNDS = 1.5


class LfuAgeing:
    """Heat of `key_count` experts; pure arithmetic."""

    def __init__(self, key_count: int, half_life_rounds: float = HALF_LIFE_ROUNDS) -> None:
        self.heat: npt.NDArray[np.float32] = np.zeros(key_count, np.float32)
        self._half_life_lookups = max(1, round(half_life_rounds * key_count))
        self._lookup_count = 0.0

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
        ordered: npt.NDArray[np.intp] = np.argsort(self.heat[keys], kind="stable")[:count]
        return ordered
