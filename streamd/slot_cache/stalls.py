"""Which clients hold up another one without being held up themselves."""

from shared.slots import SlotState
from streamd.slot_cache.cache import HostCache
from streamd.slot_cache.cache_client import CacheClient


def stalled_clients(cache: HostCache, now_ms: float, deadline_ms: float) -> list[int]:
    """Clients that have not moved for `deadline_ms` and held up another one all that time.

    A client that itself waits for a slab is not stalled: we are. So are we where it is ours.
    """
    if not cache.waiting:
        return []
    moved_before_ms = now_ms - deadline_ms
    return [
        client.number
        for client in cache.clients.values()
        if client.still_since_ms <= moved_before_ms
        and not (client.ours or _waits(cache, client))
        and any(
            other.still_since_ms <= moved_before_ms
            and cache.reserve.is_held_up(other, client, cache.class_of_key(key))
            for other in cache.asking
            for key in other.wanted
        )
    ]


def _waits(cache: HostCache, client: CacheClient) -> bool:
    return bool(client.wanted) or any(
        cache.class_of_slot(slot).state_of(slot) == SlotState.READING for slot in client.pins
    )
