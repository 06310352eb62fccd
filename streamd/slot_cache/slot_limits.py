"""Taking slots out of use and back, while clients go on reading the others."""

from shared.slots import ClassSlots
from streamd.slot_cache.cache import HostCache


def close_slots(cache: HostCache, slots: ClassSlots, count: int) -> None:
    """Take up to `count` slots of a class out of use: FREE ones at once, others after their grace.

    They are none of the reserve, nor of what the clients' sections may need. A class with a slot
    for each expert is left as it is: it has no reserve, and the sections under way count on that.
    """
    if slots.holds_all:
        return
    cache.reclaim()
    reserve = cache.reserve
    left_count = min(count, slots.usable_count - reserve.floor_count(slots, cache.ahead))
    while left_count > 0 and reserve.may_give(slots, reserve.share_of_all(slots)):
        slots.close()
        left_count -= 1
    cache.eviction.take_out(cache.eviction.choose(slots, left_count), for_good=True)


def open_slots(slots: ClassSlots, count: int) -> None:
    """Put so many of a class's closed slots back into use."""
    for _ in range(min(count, len(slots.closed))):
        slots.open()
