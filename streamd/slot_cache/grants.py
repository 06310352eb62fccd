"""What a step of a tier's cache decides, for those who carry it out."""

from dataclasses import dataclass, field
from typing import NamedTuple

from streamd.readers.slab_read import Priority

NOBODY = -1


class Grant(NamedTuple):
    """Bring this expert into this slot. Above DEMAND: nobody waits for it yet.

    owner: number of the client that it is for; NOBODY where nobody waits. Owners take turns.
    """

    slot: int
    layer: int
    expert: int
    priority: Priority = Priority.DEMAND
    owner: int = NOBODY


class Wishes(NamedTuple):
    """Experts to bring before anybody waits for them, by key, those wanted most first.

    prefetch: hinted; victims are retired for them. spare_count: slots of each class to keep FREE
    or in LIMBO for hints to come, so that those need not wait for a victim's readers.
    backfill: into slots that are FREE anyway, while nothing is demanded.
    """

    prefetch: tuple[int, ...] = ()
    spare_count: int = 0
    backfill: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.prefetch or self.backfill)


NO_WISHES = Wishes()


@dataclass
class Step:
    """Slabs to bring, and clients whose wait may be over.

    joined: slots whose slab was on its way for nobody, and the client that waits for it from now
    on.
    """

    grants: list[Grant] = field(default_factory=list)
    ring: set[int] = field(default_factory=set)
    joined: dict[int, int] = field(default_factory=dict)
