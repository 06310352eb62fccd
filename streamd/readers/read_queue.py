"""What waits to be read, by priority, and how many bytes of each are in flight.

DEMAND    goes first, up to the whole limit
PREFETCH  when nothing is demanded, up to a share of the limit: a demand finds room at once
BACKFILL  when nothing else waits and no demand is in flight: a disk that is idle otherwise

Of one priority, those who asked take turns, a slab each: one that waits for many does not hold up
one that waits for a few.
"""

from streamd.readers.pieces import Piece, Slab
from streamd.readers.slab_read import Priority
from streamd.scheduling.fair_queue import FairQueue

PREFETCH_SHARE = 0.5
BACKFILL_SHARE = 0.5


class ReadQueue:
    def __init__(self) -> None:
        self._waiting = tuple(FairQueue[Piece](_of_one_slab) for _ in Priority)
        self._in_flight = [0 for _ in Priority]  # their bytes
        self.in_flight_bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    @property
    def demanded(self) -> bool:
        """Whether a demand waits: then the limit is all that holds it back."""
        return bool(self._waiting[Priority.DEMAND])

    @property
    def serves_clients(self) -> bool:
        """Whether anything waits or is in flight that a client waits for or has hinted."""
        demand, prefetch = Priority.DEMAND, Priority.PREFETCH
        return bool(
            self._in_flight[demand]
            or self._in_flight[prefetch]
            or self._waiting[demand]
            or self._waiting[prefetch]
        )

    def push(self, piece: Piece) -> None:
        self._waiting[piece.slab.priority].append(piece.slab.owner, piece)

    def push_front(self, piece: Piece) -> None:
        self._waiting[piece.slab.priority].append_first(piece.slab.owner, piece)

    def take(self, limit_bytes: int) -> Piece | None:
        """The next piece to read; None if nothing waits, or nothing may start yet.

        A piece larger than the limit is read alone.
        """
        priority = self._highest()
        if priority is None:
            return None
        queue = self._waiting[priority]
        size_bytes = queue.first().target.nbytes
        if self.in_flight_bytes and not self._may_start(priority, size_bytes, limit_bytes):
            return None
        piece = queue.pop()
        piece.charged_to = priority
        self._in_flight[priority] += size_bytes
        self.in_flight_bytes += size_bytes
        return piece

    def ended(self, piece: Piece) -> None:
        size_bytes = piece.target.nbytes
        self._in_flight[piece.charged_to] -= size_bytes
        self.in_flight_bytes -= size_bytes

    def waiting_count(self, slab: Slab) -> int:
        """Pieces of a slab that wait."""
        return sum(piece.slab is slab for piece in self._waiting[slab.priority])

    def withdraw(self, slab: Slab) -> int:
        """Forget what waits of a slab; how many pieces that were."""
        withdrawn_count = len(self._take_out(slab))
        slab.pieces_left -= withdrawn_count
        return withdrawn_count

    def promote(self, slab: Slab, owner: int) -> None:
        """Make what is left of a slab a demand, behind its owner's demands that wait already."""
        moved = self._take_out(slab)
        slab.priority, slab.owner = Priority.DEMAND, owner
        for piece in moved:
            self.push(piece)

    def _take_out(self, slab: Slab) -> list[Piece]:
        return self._waiting[slab.priority].remove(lambda piece: piece.slab is slab)

    def _highest(self) -> int | None:
        """Priority of what goes next."""
        for priority, queue in enumerate(self._waiting):
            if queue:
                return priority
        return None

    def _may_start(self, priority: int, size_bytes: int, limit_bytes: int) -> bool:
        """Beside what is in flight."""
        if self.in_flight_bytes + size_bytes > limit_bytes:
            return False
        if priority == Priority.DEMAND:
            return True
        own_bytes = self._in_flight[priority] + size_bytes
        if priority == Priority.PREFETCH:
            return own_bytes <= PREFETCH_SHARE * limit_bytes
        demands = self._in_flight[Priority.DEMAND] > 0
        return not demands and own_bytes <= BACKFILL_SHARE * limit_bytes


def _of_one_slab(first: Piece, second: Piece) -> bool:
    return first.slab is second.slab
