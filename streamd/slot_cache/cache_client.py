"""What the host cache remembers of one attached client."""

from shared.residency import MAX_CLIENTS, NONE_EPOCH, ClientArea
from shared.slots import ClassSlots


class CacheClient:
    """Its requests and pins, and what its area said when the daemon last looked.

    wanted: experts it asked for in its section and that have no slot yet, as keys of the cache.
    pins: slots given for the section it is in, READING or LIVE.
    still_since_ms: when it last moved, or got something it had waited for.
    wave_limit: the most experts a section of it needs, where that is less than the class's wave.
    counts_uses: whether its area does; of many parts of the daemon one counts for all.
    """

    def __init__(
        self,
        number: int,
        area: ClientArea,
        now_ms: float,
        wave_limit: int | None = None,
        counts_uses: bool = True,
    ) -> None:
        self.number = number
        self.area = area
        self._wave_limit = wave_limit
        self.wanted: set[int] = set()
        self.pins: set[int] = set()
        self.published = NONE_EPOCH
        self.section = area.section
        self.still_since_ms = now_ms
        self.counts_uses = counts_uses
        self.absorbed = area.counted.copy()
        self._uses_by_key = area.counted.reshape(2, -1)  # a view

    def uses_of(self, key: int) -> int:
        """So often it has used an expert, or parts of it: a number that grows with each use."""
        return sum(self._uses_by_key[:, key].tolist())

    @property
    def ours(self) -> bool:
        """Whether it is a part of the daemon: its number is no index into `revoked` then."""
        return self.number >= MAX_CLIENTS

    def wave_experts(self, slots: ClassSlots) -> int:
        """The most experts of a class that one of its sections may need."""
        limit = self._wave_limit
        return slots.wave_experts if limit is None else min(limit, slots.wave_experts)

    @property
    def age(self) -> tuple[int, int]:
        """Smaller is older."""
        return (self.published, self.number)

    @property
    def holds(self) -> bool:
        """Whether anything is wanted or pinned for it."""
        return bool(self.pins or self.wanted)

    @property
    def in_section(self) -> bool:
        return self.published != NONE_EPOCH
