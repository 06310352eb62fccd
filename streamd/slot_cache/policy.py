"""Which experts are worth keeping: LFU with ageing.

An expert's heat is the number of times routers chose it, halved again and again as lookups go by,
so that what was hot an hour ago makes room. Heat belongs to the expert, not to its slot: an expert
that comes back finds the heat it left with.
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
        self._lookup_count = 0

    def absorb(self, uses: npt.NDArray[np.uint32]) -> None:
        """Count `uses` [key_count] new lookups of each expert."""
        self.heat += uses
        self._lookup_count += int(uses.sum())
        # At once: the counts are the clients' word, and may be anything.
        half_lives, self._lookup_count = divmod(self._lookup_count, self._half_life_lookups)
        self.heat *= np.float32(0.5**half_lives)

    def coldest(self, keys: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.intp]:
        """Positions in `keys` of the `count` coldest, coldest first (ties: the earlier one)."""
        ordered: npt.NDArray[np.intp] = np.argsort(self.heat[keys], kind="stable")[:count]
        return ordered
