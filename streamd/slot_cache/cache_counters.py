"""What a cache counts for `streamd stats`."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class CacheCounters:
    """Cumulative; of clients that have left, and of what the daemon itself does."""

    misses: int = 0
    evictions: int = 0
    joined_reads: int = 0
    revocations: int = 0
    departed_hits: int = 0
    departed_tokens: int = 0
    layer_misses: Counter[int] = field(default_factory=Counter)

    def count_misses(self, layer: int, expert_count: int) -> None:
        self.misses += expert_count
        self.layer_misses[layer] += expert_count
