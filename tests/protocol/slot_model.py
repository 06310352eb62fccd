"""docs/protocol.md as a machine of atomic steps, with a switch that leaves any one rule out.

From a state, `steps` gives everything that can happen next: to a client, the daemon, the disk, or
by ill luck. Every choice the page leaves open (which expert, which victim, which request first) is
taken. A client's choice of what to read is made as late as it can be: when it looks it up.

The client's store to `published` is seen at once here. In truth it may stay in a store buffer, but
the daemon reads it only after a barrier that empties those; `broken="barrier"` takes that away.
"""

from collections.abc import Iterator

from slot_client import client_steps, reads_done
from slot_daemon import daemon_steps, published, revocations
from slot_state import (
    EARLIER_SECTION,
    ENTRY,
    FREE,
    LIVE,
    NONE,
    READING,
    READY,
    SECTION,
    Client,
    Setup,
    Slot,
    State,
    canonical,
)

# Who owes a step, as bits: a run in which one of them can step from some time on and never does
# is not fair. Nobody owes ill luck, nor the beginning of a section.
NOBODY, DAEMON, REVOCATION, DISK_FOR_NOBODY = 0, 1, 2, 4
MAX_CLIENTS = 8


def client_owes(c: int) -> int:
    return 8 << c


def post_owes(c: int) -> int:
    return 8 << MAX_CLIENTS << c


def disk_owes(pins: int) -> int:
    """Reads are told apart by the clients that wait for them."""
    return pins << 3 + 2 * MAX_CLIENTS or DISK_FOR_NOBODY


BETWEEN_STEPS = ~(DAEMON | sum(map(client_owes, range(MAX_CLIENTS))))


class SlotModel:
    def __init__(self, setup: Setup) -> None:
        assert setup.clients <= MAX_CLIENTS
        self.setup = setup

    def start(self) -> State:
        setup = self.setup
        sections = setup.sections or (-1,) * setup.clients
        clients = [Client("idle", left) for left in sections]
        if setup.late:
            clients[-1] = clients[-1]._replace(at="away")
        attached = sum(1 << c for c, x in enumerate(clients) if x.at == "idle")
        free = setup.wave * setup.clients if setup.warm else setup.slots
        slots = [Slot()] * free + [Slot(LIVE)] * (setup.slots - free)
        faults = 1 if setup.fault else 0
        state = State(READY, 1, attached, 0, (), faults, tuple(clients), tuple(slots))
        return self.canonical(state)

    def canonical(self, s: State) -> State:
        return canonical(s, daemon_step_is_atomic=not self.setup.split)

    def steps(self, s: State) -> Iterator[tuple[str, int, State]]:
        """(what happens, who owed it, the state after it)."""
        for c, me in enumerate(s.clients):
            if me.stalled:
                yield f"client {c} wakes up", NOBODY, s.client(c, stalled=False)
            else:
                for what, owed, after in client_steps(self.setup, s, c):
                    yield f"client {c} {what}", client_owes(c) if owed else NOBODY, after
        for what, after in daemon_steps(self.setup, s):
            clients = zip(s.clients, after.clients, strict=True)
            come = [c for c, (then, now) in enumerate(clients) if then.mail > now.mail]
            yield f"daemon {what}", DAEMON | sum(map(post_owes, come)), after
        if s.phase == READY:
            for what, after in revocations(self.setup, s):
                yield f"daemon {what}", REVOCATION, after
            for i, x in s.unlike_slots():
                if x.kind == READING:  # one step: nobody sees the read before its publication
                    yield (
                        f"read to slot {i} published",
                        disk_owes(x.pins),
                        published(self.setup, s, i),
                    )
                elif x.held:
                    yield f"slot {i} is held no longer", NOBODY, s.slot(i, held=False)
        if s.faults_left:
            for what, after in self._faults(s):
                yield what, NOBODY, after._replace(faults_left=s.faults_left - 1)

    def waits(self, s: State, c: int) -> bool:
        """Whether the protocol owes client `c` an end of its waiting."""
        return s.clients[c].at in ("wait", "attaching") and not s.clients[c].stalled

    def _faults(self, s: State) -> Iterator[tuple[str, State]]:
        alive = [c for c, x in enumerate(s.clients) if x.at not in ("dead", "away")]
        match self.setup.fault:
            case "stall":
                for c in alive:
                    if s.clients[c].at in SECTION:
                        yield f"client {c} stops", s.client(c, stalled=True)
            case "death":
                for c in alive:
                    clients = (*s.clients[:c], Client("dead"), *s.clients[c + 1 :])
                    yield f"client {c} dies", reads_done(s, c)._replace(clients=clients)
            case "failed read":
                for i, x in s.unlike_slots():
                    if x.kind == READING and s.phase == READY:
                        yield f"read to slot {i} fails", _read_failed(s, i)
            case "restart":
                yield "the daemon dies and another starts", _restarted(s, alive)


def _read_failed(s: State, i: int) -> State:
    """Nobody has seen the slot: it is FREE. Who waits for it is told, and leaves."""
    pins, after = s.slots[i].pins, s.slot(i, kind=FREE, expert=0, pins=0, old_pins=0, held=False)
    for c, x in enumerate(s.clients):
        if pins >> c & 1 and x.at == "wait":
            after = reads_done(after, c).client(c, at="leave")
    return after


def _restarted(s: State, alive: list[int]) -> State:
    """New memory, no clients. The old memory stays as it was, and so does what is read in it."""
    clients = list(s.clients)
    for c in alive:
        x = clients[c]
        mail = EARLIER_SECTION if x.mail else 0
        if x.at == "attaching":
            clients[c] = Client("attaching", x.sections_left, mail=mail)
            continue
        clients[c] = x._replace(
            at="lookup" if x.at in ENTRY else x.at,  # the old epoch does not move any more
            read=NONE,
            published=NONE,
            looked_up=0,
            misses=(),
            mail=mail,
            asked=0,
            lost=True,
        )
    slots = (Slot(),) * len(s.slots)
    return State(READY, 1, 0, 0, (), s.faults_left, tuple(clients), slots)
