"""Who may have a FREE slot: the reserve and the age of sections, as docs/protocol.md has them.

Each size class keeps `w` slots FREE or in LIMBO for every attached client, at every moment, so that
the oldest section finds its `w` whatever the others do.
"""

from collections.abc import Collection, Iterable, Mapping

from shared.errors import DaemonBusy, PlanError
from shared.slots import ClassSlots
from streamd.slot_cache.cache_client import CacheClient

# Of a class's slots, the most that hold what nobody has asked for yet: one in so many, and so many.
AHEAD_DIVISOR = 8
MAX_AHEAD_SLOTS = 64


class Reserve:
    """A view of the attached clients, by number, which tells of who comes and goes.

    tier: "host" or "gpu", for what is said when there is no room.
    """

    def __init__(self, clients: Mapping[int, CacheClient], tier: str = "host") -> None:
        self._clients = clients
        self._tier = tier
        self._counts: dict[ClassSlots, int] = {}

    def clients_changed(self) -> None:
        """One has come or gone."""
        self._counts.clear()

    def count(self, slots: ClassSlots) -> int:
        """Slots of a class that are FREE or in LIMBO at every moment."""
        count = self._counts.get(slots)
        if count is None:
            waves = (client.wave_experts(slots) for client in self._clients.values())
            count = self._counts[slots] = 0 if slots.holds_all else sum(waves)
        return count

    def check_room(self, classes: Iterable[ClassSlots], newcomer: CacheClient) -> None:
        """PlanError or DaemonBusy unless one more client can have its slots and its reserve."""
        for slots in classes:
            if slots.holds_all:
                continue
            reserve_count = self.count(slots) + newcomer.wave_experts(slots)
            if slots.usable_count < 2 * reserve_count:
                raise PlanError(
                    f"a size class of the {self._tier} cache has {slots.usable_count} slots,"
                    f" {len(self._clients) + 1} clients need {2 * reserve_count}",
                    f"restart the daemon with a larger --{self._tier}-cache, or end another client",
                )
            if slots.retirable_count < reserve_count:
                raise DaemonBusy("all slots are being read into", "try again in a moment")

    def share_of_older(self, slots: ClassSlots, client: CacheClient) -> int:
        """FREE slots that belong to the sections older than the client's."""
        if slots.holds_all:
            return 0
        return sum(
            max(0, other.wave_experts(slots) - sum(map(slots.owns, other.pins)))
            for other in self._clients.values()
            if other.age < client.age
        )

    def share_of_all(self, slots: ClassSlots) -> int:
        """FREE slots that belong to the clients' sections, those that they may yet begin too."""
        if slots.holds_all:
            return 0
        return sum(
            max(0, client.wave_experts(slots) - sum(map(slots.owns, client.pins)))
            for client in self._clients.values()
        )

    def room_ahead(self, slots: ClassSlots, ahead: Collection[int]) -> int:
        """How many more slots of a class may be given ahead, `ahead` being given already.

        They are none of the `2 x w x clients` that the argument for every section's end counts on.
        """
        beyond_floor_count = slots.usable_count - 2 * self.count(slots)
        share_count = min(max(1, slots.usable_count // AHEAD_DIVISOR), MAX_AHEAD_SLOTS)
        return min(beyond_floor_count, share_count) - sum(map(slots.owns, ahead))

    def floor_count(self, slots: ClassSlots, ahead: Collection[int]) -> int:
        """Slots that a class must keep for the clients it has, and for what is held ahead."""
        return 2 * self.count(slots) + sum(map(slots.owns, ahead))

    def may_give(self, slots: ClassSlots, share_of_older: int) -> bool:
        """Whether one more slot can be given to whom `share_of_older` was counted for."""
        return len(slots.free) > share_of_older and slots.spare_count > self.count(slots)

    def is_held_up(self, client: CacheClient, by: CacheClient, slots: ClassSlots) -> bool:
        """Whether the client lacks FREE slots that are in LIMBO for the sake of an older one."""
        return (
            by.age < client.age
            and bool(slots.limbo)
            and by.published < slots.limbo[-1][0]
            and len(slots.free) <= self.share_of_older(slots, client)
        )
