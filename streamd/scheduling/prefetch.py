"""What clients say they may need, from the hint to the verdict on it. Pure policy, of one tier.

    hinted --+--> expired                      passed or too old before it had a slot: not brought
             +--> demanded                     somebody asked before it had a slot
             +--> on its way --+--> withdrawn  passed before the disk (or the GPU) had begun
                               +--> late       demanded while it was on its way
                               +--> failed
                               +--> there --+--> useful   used before its hints had passed
                                            +--> wasted   not used

A hint says in which of its sections the client expects to read the layer. It has passed when the
client has asked for what it lacks in that section, which the router has chosen by then; when its
area, which the daemon sees without a message, shows a later section; when the client has gone; or
after HINT_AGE_MS. An expert hinted by several clients lives until the last one has passed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice, zip_longest

from shared.residency import ClientArea

# Longer than the slowest disk takes for a few layers; then the client is doing something else.
HINT_AGE_MS = 2000.0
# Of one client, hints that wait for a slot: a few layers' worth.
MAX_WAITING = 256
# What could not be brought is not brought for a hint again so soon; so many are remembered.
FAILED_PAUSE_MS = 60_000.0
MAX_FAILED = 256
# Slots kept FREE for hints to come while clients give any.
SPARE_SLOTS = 32


# The verdicts that people are shown.
PREFETCH_OUTCOMES = ("useful", "late", "wasted")


@dataclass
class PrefetchCounters:
    """Experts, and bytes of their slabs.

    hinted = expired + demanded + issued + those that wait; refused: beyond MAX_WAITING, or
    failed a while ago.
    issued = useful + late + wasted + withdrawn + failed + those without a verdict yet.
    """

    hinted: int = 0
    refused: int = 0
    expired: int = 0
    demanded: int = 0
    issued: int = 0
    useful: int = 0
    late: int = 0
    wasted: int = 0
    withdrawn: int = 0
    failed: int = 0
    issued_bytes: int = 0
    useful_bytes: int = 0
    late_bytes: int = 0
    wasted_bytes: int = 0


@dataclass(slots=True)
class Hinted:
    """An expert and who may need it: for each client the last section that it was hinted for.

    uses: how often it had been used when it was given its slot.
    """

    key: int
    size_bytes: int
    deadline_ms: float
    sections: dict[int, int] = field(default_factory=dict)
    uses: int = 0
    slot: int | None = None
    is_there: bool = False


class Prefetch:
    """slab_bytes: of an expert's key. uses_of: a number that another use of an expert changes."""

    def __init__(self, slab_bytes: Callable[[int], int], uses_of: Callable[[int], int]) -> None:
        self.counters = PrefetchCounters()
        self._slab_bytes = slab_bytes
        self._uses_of = uses_of
        self._areas: dict[int, ClientArea] = {}
        self._waiting: dict[int, Hinted] = {}  # by key
        self._given: dict[int, Hinted] = {}  # by slot
        self._failed_until_ms: dict[int, float] = {}  # by key, the oldest first
        self._heard_at_ms = -HINT_AGE_MS
        self._asked: dict[int, int] = {}  # the last section that each client has asked in
        self._seen: dict[int, int] = {}  # each client's first section to come, when last looked at
        self._look_at_ms = 0.0

    # What happens to hints

    def hint(
        self, number: int, area: ClientArea, section: int, keys: Iterable[int], now_ms: float
    ) -> None:
        """A client may need experts that have no slot in this tier, the likeliest first."""
        if section < area.section:
            return
        self._areas[number] = area
        self._heard_at_ms = now_ms
        room_count = MAX_WAITING - sum(number in h.sections for h in self._waiting.values())
        underway = {h.key: h for h in self._given.values()}
        for key in keys:
            hinted = underway.get(key) or self._waiting.get(key)
            if hinted is None:
                if room_count <= 0 or self._has_failed(key, now_ms):
                    self.counters.refused += 1
                    continue
                room_count -= 1
                self.counters.hinted += 1
                hinted = self._waiting[key] = Hinted(key, self._slab_bytes(key), now_ms)
            hinted.sections[number] = max(section, hinted.sections.get(number, 0))
            hinted.deadline_ms = now_ms + HINT_AGE_MS
        self._look_at_ms = min(self._look_at_ms, now_ms + HINT_AGE_MS)

    def asked(self, number: int, section: int) -> None:
        """A client has asked for all that it lacks in a section."""
        if number in self._areas:
            self._asked[number] = section

    def forget(self, number: int) -> None:
        """A client has gone; `passed` tells what nobody waits for any more."""
        self._areas.pop(number, None)
        self._asked.pop(number, None)

    def wishes(self, count: int, may_come: Callable[[int], bool]) -> tuple[int, ...]:
        """Keys to bring next, of those that may come now.

        Clients take turns; of each, the section that comes first goes first, then as it hinted.
        """
        by_client: dict[int, list[tuple[int, int]]] = {}
        for hinted in self._waiting.values():
            if may_come(hinted.key):
                number, section = min(hinted.sections.items(), key=lambda item: item[1])
                by_client.setdefault(number, []).append((section, hinted.key))
        queues = [sorted(queue, key=lambda item: item[0]) for queue in by_client.values()]
        turns = (item[1] for turn in zip_longest(*queues) for item in turn if item is not None)
        return tuple(islice(turns, count))

    def spare_count(self, now_ms: float) -> int:
        """Slots to keep for hints to come: while they come."""
        return SPARE_SLOTS if now_ms - self._heard_at_ms < HINT_AGE_MS else 0

    def __contains__(self, slot: int) -> bool:
        """Whether what is in a slot, or on its way there, was hinted and has no verdict yet."""
        return slot in self._given

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def pending(self) -> bool:
        """Whether anything has no verdict yet."""
        return bool(self._waiting or self._given)

    # What happens to slabs

    def given(self, key: int, slot: int) -> None:
        hinted = self._waiting.pop(key)
        hinted.slot, hinted.uses = slot, self._uses_of(key)
        self._given[slot] = hinted
        self.counters.issued += 1
        self.counters.issued_bytes += hinted.size_bytes

    def demanded(self, key: int) -> None:
        """Somebody waits for an expert; whoever hinted it need not be told any more."""
        if self._waiting.pop(key, None):
            self.counters.demanded += 1

    def joined(self, slot: int) -> None:
        """Somebody waits for what is on its way to `slot`."""
        if hinted := self._given.pop(slot, None):
            self.counters.late += 1
            self.counters.late_bytes += hinted.size_bytes

    def landed(self, slot: int) -> bool:
        """Whether the slab that has arrived was hinted and has no verdict yet."""
        hinted = self._given.get(slot)
        if hinted is not None:
            hinted.is_there = True
            self._look_at_ms = 0.0  # it may have passed while it was on its way
        return hinted is not None

    def there(self) -> list[int]:
        """Slots whose slabs have no verdict yet."""
        return [slot for slot, hinted in self._given.items() if hinted.is_there]

    def failed(self, slot: int, now_ms: float) -> None:
        if hinted := self._given.pop(slot, None):
            self.counters.failed += 1
            self._failed_until_ms[hinted.key] = now_ms + FAILED_PAUSE_MS
            if len(self._failed_until_ms) > MAX_FAILED:
                del self._failed_until_ms[next(iter(self._failed_until_ms))]

    def _has_failed(self, key: int, now_ms: float) -> bool:
        """Whether it could not be brought a while ago."""
        if now_ms < self._failed_until_ms.get(key, 0.0):
            return True
        self._failed_until_ms.pop(key, None)
        return False

    # What has passed

    def passed(self, now_ms: float) -> list[Hinted]:
        """Hints whose layer has passed, or whose slab has been used: nothing holds its slot then.

        Those without a slot are forgotten, the others stay: for each of these, `withdrawn` or, once
        it is there, `judge` has to follow.
        """
        sections = {
            number: (section := area.section) + (self._asked.get(number) == section)
            for number, area in self._areas.items()
        }
        if sections == self._seen and now_ms < self._look_at_ms:
            return []
        self._seen = sections
        self._look_at_ms = now_ms + HINT_AGE_MS / 2
        over = [h for h in self._waiting.values() if _is_over(h, sections, now_ms)]
        for hinted in over:
            del self._waiting[hinted.key]
            self.counters.expired += 1
        return [
            hinted
            for hinted in self._given.values()
            if _is_over(hinted, sections, now_ms) or (hinted.is_there and self._is_used(hinted))
        ]

    def withdrawn(self, slot: int) -> None:
        """It will not come: nothing of it had begun."""
        hinted = self._given.pop(slot)
        self.counters.withdrawn += 1
        self.counters.issued_bytes -= hinted.size_bytes

    def _is_used(self, hinted: Hinted) -> bool:
        return self._uses_of(hinted.key) != hinted.uses  # clients' counts may wrap

    def judge(self, slot: int) -> bool:
        """The verdict on a slab that is there: whether it was useful."""
        hinted = self._given.pop(slot)
        assert hinted.is_there
        useful = self._is_used(hinted)
        if useful:
            self.counters.useful += 1
            self.counters.useful_bytes += hinted.size_bytes
        else:
            self.counters.wasted += 1
            self.counters.wasted_bytes += hinted.size_bytes
        return useful


def _is_over(hinted: Hinted, sections: dict[int, int], now_ms: float) -> bool:
    """sections: of each client, the first one that it may yet need something for."""
    if now_ms >= hinted.deadline_ms:
        return True
    for number, section in hinted.sections.items():  # a loop, for there are many and often
        if sections.get(number, section + 1) <= section:
            return False
    return True
