"""What a cache counts for `streamd stats`."""

from dataclasses import dataclass


@dataclass
class CacheCounters:
    """Cumulative; of clients that have left, and of what the daemon itself does."""

    misses: int = 0
    evictions: int = 0
    joined_reads: int = 0
    revocations: int = 0
    departed_hits: int = 0
    departed_tokens: int = 0
