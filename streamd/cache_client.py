"""What the host cache remembers of one attached client."""

from shared.residency import NONE_EPOCH, ClientArea


class CacheClient:
    """Its pins, and what its area said when the daemon last looked.

    pins: slots given for the section it is in, READING or LIVE.
    """

    def __init__(self, number: int, area: ClientArea, now_ms: float) -> None:
        self.number = number
        self.area = area
        self.pins: set[int] = set()
        self.published = NONE_EPOCH
        self.section = area.section
        self.seen_since_ms = now_ms
        self.absorbed_uses = area.uses.reshape(-1).copy()

    @property
    def age(self) -> tuple[int, int]:
        """Smaller is older."""
        return (self.published, self.number)

    @property
    def in_section(self) -> bool:
        return self.published != NONE_EPOCH
