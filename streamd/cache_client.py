"""What the host cache remembers of one attached client."""

from shared.residency import NONE_EPOCH, ClientArea


class CacheClient:
    """Its requests and pins, and what its area said when the daemon last looked.

    wanted: experts it asked for in its section and that have no slot yet, as keys of the cache.
    pins: slots given for the section it is in, READING or LIVE.
    still_since_ms: when it last moved, or got something it had waited for.
    """

    def __init__(self, number: int, area: ClientArea, now_ms: float) -> None:
        self.number = number
        self.area = area
        self.wanted: set[int] = set()
        self.pins: set[int] = set()
        self.published = NONE_EPOCH
        self.section = area.section
        self.still_since_ms = now_ms
        self.absorbed_uses = area.uses.reshape(-1).copy()

    @property
    def age(self) -> tuple[int, int]:
        """Smaller is older."""
        return (self.published, self.number)

    @property
    def in_section(self) -> bool:
        return self.published != NONE_EPOCH
