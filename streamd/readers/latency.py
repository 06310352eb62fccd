"""Percentiles of latencies in a fixed amount of memory."""

import math

BUCKETS_PER_OCTAVE = 8
BUCKET_COUNT = 26 * BUCKETS_PER_OCTAVE  # 1 us to 67 s; what is longer falls into the last one
FLOOR_MS = 0.001


class LatencyHistogram:
    """Counts in buckets 9% wide: a percentile is at most that much too high."""

    def __init__(self) -> None:
        self._counts = [0] * BUCKET_COUNT
        self._total = 0

    def add(self, latency_ms: float) -> None:
        octaves = math.log2(max(latency_ms, FLOOR_MS) / FLOOR_MS)
        self._counts[min(int(octaves * BUCKETS_PER_OCTAVE), BUCKET_COUNT - 1)] += 1
        self._total += 1

    def percentile_ms(self, percent: float) -> float:
        """What `percent` of all latencies stay below; 0 before the first one."""
        rank = math.ceil(self._total * percent / 100)
        seen = 0
        for index, count in enumerate(self._counts):
            seen += count
            if count and seen >= rank:
                return FLOOR_MS * math.exp2((index + 1) / BUCKETS_PER_OCTAVE)
        return 0.0
