"""A queue whose owners take turns, so that one who wants a lot does not hold up the others."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Items of one owner stay in order. stays: whether the second of two items belongs to the
    first one's turn; without it a turn is one item."""

    def __init__(self, stays: Callable[[Item, Item], bool] = lambda _first, _second: False) -> None:
        self._queues: dict[int, deque[Item]] = {}  # none is empty; the first one's turn it is
        self._stays = stays
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Item]:
        """By owner."""
        for queue in self._queues.values():
            yield from queue

    def append(self, owner: int, item: Item) -> None:
        self._queues.setdefault(owner, deque()).append(item)
        self._count += 1

    def append_first(self, owner: int, item: Item) -> None:
        """It goes before everything, and so does what else its owner has."""
        queue = self._queues.pop(owner, deque())
        queue.appendleft(item)
        self._queues = {owner: queue, **self._queues}
        self._count += 1

    def first(self) -> Item:
        """Whose turn it is, left where it is."""
        return next(iter(self._queues.values()))[0]

    def pop(self) -> Item:
        owner, queue = next(iter(self._queues.items()))
        item = queue.popleft()
        self._count -= 1
        if not queue:
            del self._queues[owner]
        elif not self._stays(item, queue[0]):
            self._queues[owner] = self._queues.pop(owner)
        return item

    def remove(self, is_meant: Callable[[Item], bool]) -> list[Item]:
        """Take out whatever is meant; in order."""
        removed: list[Item] = []
        for owner, queue in list(self._queues.items()):
            kept: deque[Item] = deque()
            for item in queue:
                (removed if is_meant(item) else kept).append(item)
            if kept:
                self._queues[owner] = kept
            else:
                del self._queues[owner]
        self._count -= len(removed)
        return removed
