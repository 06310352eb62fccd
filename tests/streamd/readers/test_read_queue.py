"""Who goes first, and how much may be in flight: pure, on pieces that are never read."""

from types import SimpleNamespace

import pytest

from streamd.readers.pieces import Piece, Slab
from streamd.readers.read_queue import ReadQueue
from streamd.readers.slab_read import Priority

MIB = 1 << 20
LIMIT = 16 * MIB


class _Queue(ReadQueue):
    def add(self, key, priority, pieces=1, size=MIB):
        slab = Slab(key, priority, 0.0)
        for number in range(pieces):
            slab.pieces_left += 1
            target = SimpleNamespace(nbytes=size)
            self.push(Piece(slab, None, number, target, size))
        return slab

    def take_all(self, limit=LIMIT):
        taken = []
        while (piece := self.take(limit)) is not None:
            taken.append(piece)
        return taken


@pytest.fixture
def queue():
    return _Queue()


def _keys(pieces):
    return [piece.slab.key for piece in pieces]


def test_demand_goes_before_prefetch_before_backfill(queue):
    for key, priority in (
        ("b", Priority.BACKFILL),
        ("p", Priority.PREFETCH),
        ("d", Priority.DEMAND),
    ):
        queue.add(key, priority)
    order = []
    while (piece := queue.take(LIMIT)) is not None:
        order.append(piece.slab.key)
        queue.ended(piece)
    assert order == ["d", "p", "b"]


def test_demands_fill_the_limit_and_no_more(queue):
    queue.add("d", Priority.DEMAND, pieces=40)
    taken = queue.take_all()
    assert len(taken) == 16
    assert queue.in_flight_bytes == LIMIT
    queue.ended(taken[0])
    assert len(queue.take_all()) == 1


def test_what_is_read_ahead_leaves_room_for_a_demand(queue):
    queue.add("p", Priority.PREFETCH, pieces=40)
    assert len(queue.take_all()) == 8
    queue.add("d", Priority.DEMAND, pieces=40)
    assert _keys(queue.take_all()) == ["d"] * 8


def test_backfill_waits_for_an_idle_disk(queue):
    queue.add("d", Priority.DEMAND)
    demand = queue.take(LIMIT)
    queue.add("b", Priority.BACKFILL, pieces=40)
    assert queue.take(LIMIT) is None
    queue.ended(demand)
    assert len(queue.take_all()) == 8


def test_only_a_demand_that_waits_is_held_back_by_the_limit_alone(queue):
    queue.add("b", Priority.BACKFILL)
    queue.add("p", Priority.PREFETCH)
    assert not queue.demanded
    queue.add("d", Priority.DEMAND)
    assert queue.demanded
    queue.take(LIMIT)
    assert not queue.demanded


def test_a_read_larger_than_the_limit_goes_alone(queue):
    queue.add("d", Priority.DEMAND, pieces=2, size=4 * LIMIT)
    assert len(queue.take_all()) == 1


def test_a_promoted_slab_is_a_demand_and_its_bytes_are_charged_where_they_began(queue):
    slab = queue.add("p", Priority.PREFETCH, pieces=12)
    started = queue.take_all()
    queue.promote(slab, owner=0)
    assert slab.pieces_left == 12
    rest = queue.take_all()
    assert _keys(rest) == ["p"] * 4
    for piece in started + rest:
        queue.ended(piece)
    assert queue.in_flight_bytes == 0
    assert len(queue) == 0


def test_a_promoted_slab_waits_for_its_clients_turn_alone(queue):
    for key in ("a", "b"):
        queue.add(key, Priority.DEMAND)  # of client 0
    slab = queue.add("p", Priority.PREFETCH)
    queue.promote(slab, owner=1)
    assert _keys(queue.take_all()) == ["a", "p", "b"]


def test_withdrawing_takes_what_waits_of_one_slab_only(queue):
    slab = queue.add("a", Priority.DEMAND, pieces=3)
    queue.add("b", Priority.DEMAND, pieces=2)
    queue.take(LIMIT)
    assert queue.withdraw(slab) == 2
    assert slab.pieces_left == 1
    assert _keys(queue.take_all()) == ["b", "b"]


def test_owners_take_turns_a_slab_each(queue):
    for key, owner, pieces in (("a", 1, 2), ("b", 1, 2), ("c", 1, 1), ("x", 2, 3), ("y", 2, 1)):
        slab = Slab(key, Priority.DEMAND, 0.0, owner)
        for number in range(pieces):
            slab.pieces_left += 1
            queue.push(Piece(slab, None, number, SimpleNamespace(nbytes=MIB), MIB))
    assert _keys(queue.take_all()) == ["a", "a", "x", "x", "x", "b", "b", "y", "c"]


def test_pieces_that_wait_are_counted(queue):
    slab = queue.add("d", Priority.PREFETCH, pieces=9, size=2 * MIB)
    assert queue.waiting_count(slab) == 9
    taken = queue.take_all()
    assert queue.waiting_count(slab) == 9 - len(taken) < 9
