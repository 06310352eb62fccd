"""The states of the model of docs/protocol.md, and the one form in which equal states are equal.

Everything is a tuple of small integers and words, so that a state can be a dictionary's key.
What has no bound in the protocol has one here: epochs are replaced by their ranks, section numbers
by "this section" and "an earlier one", experts by the order in which the clients miss them.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

FREE, READING, LIVE, LIMBO = "free", "reading", "live", "limbo"
# Where the daemon stands: between two steps, or after one of the parts of a step.
READY, OBSERVED, GIVEN, RETIRED = "ready", "observed", "given", "retired"
NONE = 0  # as an epoch: nothing published, or no stamp yet
THIS_SECTION, EARLIER_SECTION = 1, 2  # whose fetches are under way, as bits

ENTRY = ("begun", "epoch read", "published")
SECTION = (*ENTRY, "lookup", "send", "wait", "compute", "check", "leave")
WAIT_OVER = ("compute", "check", "leave", "idle")


BROKEN = {
    "barrier": "the daemon reads `published` although stores may be on their way to it",
    "grace period": "a victim is FREE as soon as it is out of the table",
    "pin": "a slot given for a fetch, or found for one, may be a victim at once",
    "reserve": "any FREE slot may be given, victims are retired only for want of one",
    "surplus": "a slot is given on the credit of victims that the same step retires",
    "age": "a request leaves the share of every other section, not only of the older ones",
    "prefetch leaves the reserve": "what is read ahead may be given any FREE slot",
    "prefetch has a share": "any number of slots may be held for what is read ahead",
    "re-read": "a client does not look whether the epoch has moved while it published it",
    "revocation": "a client that has stopped is waited for",
    "revoked check": "a client does not look whether it was revoked before it uses its result",
    "revoked ends the wait": "a client looks for that only after its reads",
}


class ProtocolBroken(Exception):
    """A step was taken that must never be possible."""


@dataclass(frozen=True)
class Setup:
    """The numbers of a model, what may happen in it, and which rule is left out of it."""

    clients: int = 2
    wave: int = 1
    slots: int = 4
    warm: bool = False  # only the reserve is FREE, the other slots are LIVE
    late: bool = False  # the last client attaches some time later
    sections: tuple[int, ...] = ()  # how many each client may begin; empty: any number
    abandoners: int = -1  # one bit a client: may leave a section before its reads are done
    slow_post: bool = False  # a fetch may miss any number of the daemon's steps
    fault: str = ""  # what may happen once, at any time
    only_new_experts: bool = False  # each section wants what nobody has or wants
    prefetch: bool = False  # into slots that are held for nobody, for ever or not
    split: bool = False  # clients step between any two parts of the daemon's step
    broken: str = ""  # a key of BROKEN

    def __post_init__(self) -> None:
        assert self.fault in ("", "stall", "death", "restart", "failed read")
        assert not self.broken or self.broken in BROKEN


class Slot(NamedTuple):
    """`pins`, `old_pins` and `readers` have one bit a client."""

    kind: str = FREE
    expert: int = 0  # 0: one that no client has missed in its present section
    stamp: int = NONE
    pins: int = 0  # pinned for the client's present section
    old_pins: int = 0  # pinned for a section it has left, which the daemon has not seen yet
    held: bool = False  # read ahead, and no victim until it is let go
    readers: int = 0  # who has looked the slot up in its present section and may read it


class Client(NamedTuple):
    at: str  # "dead", "away", "attaching", "idle" or one of SECTION
    sections_left: int = -1  # how many it may still begin; negative: any number
    read: int = NONE  # the epoch it has read and not yet checked again
    published: int = NONE
    looked_up: int = 0  # experts looked up so far
    misses: tuple[tuple[int, bool], ...] = ()  # (expert, found in the table since)
    mail: int = 0  # fetches on their way to the daemon
    asked: int = 0  # fetches that the daemon has and has not answered in full
    torn: bool = False  # a slot it may read has been overwritten
    stalled: bool = False
    revoked: bool = False
    lost: bool = False  # its daemon is dead: what it maps is the memory of before


class State(NamedTuple):
    phase: str
    epoch: int
    attached: int  # one bit a client, as the daemon knows it
    joining: int  # the client whose attach this step answers
    snapshot: tuple[int, ...]  # every `published` as this step has read it
    faults_left: int
    clients: tuple[Client, ...]
    slots: tuple[Slot, ...]

    def client(self, c: int, **changes: Any) -> "State":
        clients = list(self.clients)
        clients[c] = clients[c]._replace(**changes)
        return self._replace(clients=tuple(clients))

    def slot(self, i: int, **changes: Any) -> "State":
        slots = list(self.slots)
        slots[i] = slots[i]._replace(**changes)
        return self._replace(slots=tuple(slots))

    def __str__(self) -> str:
        lines = [f"daemon {self.phase}, epoch {self.epoch}, attached {self.attached:b}"]
        for name, records in (("client", self.clients), ("slot", self.slots)):
            for i, x in enumerate(records):
                set_fields = [f"{k}={v}" for k, v in x._asdict().items() if v and v != -1]
                lines.append(f"{name} {i}: {', '.join(set_fields)}")
        return "\n".join(lines)

    def count(self, kind: str) -> int:
        return sum(x.kind == kind for x in self.slots)

    def unlike_slots(self) -> list[tuple[int, Slot]]:
        """One slot of each sort with its index: equal slots stand side by side."""
        return [next(same) for _, same in groupby(enumerate(self.slots), key=lambda pair: pair[1])]


def canonical(s: State, daemon_step_is_atomic: bool) -> State:
    """`s` without what cannot make a difference to any later step."""
    s = _compress_epochs(s)
    if daemon_step_is_atomic:
        s = _forget_left_sections(s)
    s = _forget_old_misses(s)
    clients = list(s.clients)
    names = {0: 0}
    for c, x in enumerate(clients):
        if x.misses:
            for expert, _ in x.misses:
                names.setdefault(expert, len(names))
            misses = tuple((names[expert], found) for expert, found in x.misses)
            if misses != x.misses:
                clients[c] = x._replace(misses=misses)
    slots = [
        x._replace(expert=names.get(x.expert, 0)) if names.get(x.expert) != x.expert else x
        for x in s.slots
    ]
    return s._replace(clients=tuple(clients), slots=tuple(sorted(slots)))


def _compress_epochs(s: State) -> State:
    """Epochs as ranks among those that clients have published, or have read and may publish.

    A stamp is only compared with those, and with later ones than any stamp: the rank of the
    smallest of them that lets the slot go stands for it.
    """
    epochs = {NONE, s.epoch, *s.snapshot}
    for x in s.clients:
        epochs.add(x.read)
        epochs.add(x.published)
    if len(epochs) == s.epoch + 1:
        return s
    known = sorted(epochs)
    rank = [bisect_left(known, epoch) for epoch in range(s.epoch + 1)]
    clients = tuple(
        x._replace(read=rank[x.read], published=rank[x.published]) if x.read or x.published else x
        for x in s.clients
    )
    slots = tuple(x._replace(stamp=rank[x.stamp]) if x.stamp else x for x in s.slots)
    snapshot = tuple(rank[epoch] for epoch in s.snapshot)
    return s._replace(epoch=rank[s.epoch], snapshot=snapshot, clients=clients, slots=slots)


def _forget_left_sections(s: State) -> State:
    """`s` without pins and fetches of sections that are over.

    An atomic step drops them before they play a part in anything. In a split one they do play
    one, for `published` and `section` are read at two times.
    """
    inside = sum(1 << c for c, x in enumerate(s.clients) if x.published)
    for i, slot in enumerate(s.slots):
        if slot.old_pins or slot.pins & ~inside:
            s = s.slot(i, pins=slot.pins & inside, old_pins=0)
    for c, x in enumerate(s.clients):
        now = THIS_SECTION if x.published else 0
        if (x.mail | x.asked) & ~now:
            s = s.client(c, mail=x.mail & now, asked=x.asked & now)
    return s


def _forget_old_misses(s: State) -> State:
    """`s` without misses that have been found, and that no fetch will ask for any more."""
    for c, x in enumerate(s.clients):
        if x.misses and x.at in WAIT_OVER and not (x.mail | x.asked) & THIS_SECTION:
            s = s.client(c, misses=())
    return s
