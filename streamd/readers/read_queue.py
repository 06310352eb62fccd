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
        self._in_flight = [0 for _ in Priority]

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    @property
    def demanded(self) -> bool:
        """Whether a demand waits: then the limit is all that holds it back."""
        return bool(self._waiting[Priority.DEMAND])

    @property
    def in_flight_bytes(self) -> int:
        return sum(self._in_flight)

    def push(self, piece: Piece) -> None:
        self._waiting[piece.slab.priority].append(piece.slab.owner, piece)

    def push_front(self, piece: Piece) -> None:
        self._waiting[piece.slab.priority].append_first(piece.slab.owner, piece)

    def take(self, limit_bytes: int) -> Piece | None:
        """The next piece to read; None if nothing waits, or nothing may start yet.

        A piece larger than the limit is read alone.
        """
        priority = next((p for p in Priority if self._waiting[p]), None)
        if priority is None or not self._may_start(priority, limit_bytes):
            return None
        piece = self._waiting[priority].pop()
        piece.charged_to = priority
        self._in_flight[priority] += piece.target.nbytes
        return piece

    def ended(self, piece: Piece) -> None:
        self._in_flight[piece.charged_to] -= piece.target.nbytes

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

    def _may_start(self, priority: Priority, limit_bytes: int) -> bool:
        total_bytes = self.in_flight_bytes
        if total_bytes == 0:
            return True
        size_bytes = self._waiting[priority].first().target.nbytes
        if total_bytes + size_bytes > limit_bytes:
            return False
        own_bytes = self._in_flight[priority] + size_bytes
        match priority:
            case Priority.DEMAND:
                return True
            case Priority.PREFETCH:
                return own_bytes <= PREFETCH_SHARE * limit_bytes
            case Priority.BACKFILL:
                busy = self._in_flight[Priority.DEMAND] > 0
                return not busy and own_bytes <= BACKFILL_SHARE * limit_bytes


def _of_one_slab(first: Piece, second: Piece) -> bool:
    return first.slab is second.slab
