"""How likely a router chooses what was predicted and is not there: learnt while decoding."""

from collections.abc import Container, Sequence

# A hint that is this unlikely is not sent however idle the disk: it puts something else out.
LEAST_LIKELY = 0.3
# At each rank the last so many count, the first ones against so many that were made up.
MEMORY_COUNT = 256
ASSUMED_COUNT = 8


class Likelihood:
    """By how far ahead an expert was predicted and at what rank: of those that were missing then,
    the share that the router chose. All cases count, hinted or not: nothing has to be tried out."""

    def __init__(self, top_k: int, candidate_count: int, max_distance: int) -> None:
        # Before anything is known the top-k are likely, the margin just enough.
        assumed = [0.5] * top_k + [LEAST_LIKELY] * (candidate_count - top_k)
        self._shares = [list(assumed) for _ in range(max_distance)]  # [distance - 1][rank]
        self._counts = [[ASSUMED_COUNT] * candidate_count for _ in range(max_distance)]

    def at(self, distance: int) -> Sequence[float]:
        """By rank, of predictions `distance` layers ahead."""
        return self._shares[distance - 1]

    def learn(
        self, distance: int, ranked: Sequence[int], missing: Sequence[bool], chosen: Container[int]
    ) -> None:
        """What became of a prediction: of those `ranked` some were missing, some were chosen."""
        shares, counts = self._shares[distance - 1], self._counts[distance - 1]
        for rank, was_missing in enumerate(missing):
            if was_missing:
                counts[rank] = min(counts[rank] + 1, MEMORY_COUNT)
                shares[rank] += ((ranked[rank] in chosen) - shares[rank]) / counts[rank]
