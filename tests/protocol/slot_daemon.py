"""What the daemon of the model does: its step in four parts, and revocation.

The step is cut where the page cuts it: observe, give, retire, move the epoch.
"""

from collections.abc import Iterator
from itertools import combinations, permutations, product

from slot_state import (
    FREE,
    GIVEN,
    LIMBO,
    LIVE,
    NONE,
    OBSERVED,
    READING,
    READY,
    RETIRED,
    THIS_SECTION,
    ProtocolBroken,
    Setup,
    Slot,
    State,
)

Outcome = tuple[str, State]


def daemon_steps(setup: Setup, s: State) -> Iterator[Outcome]:
    """The daemon's step, or what is left of it.

    Clients may always step between `table = -1` and `epoch += 1`; between other parts only if
    the setup says so.
    """
    part = {READY: _observe, OBSERVED: _give, GIVEN: _retire, RETIRED: _move_epoch}[s.phase]
    for what, after in part(setup, s):
        if setup.split or after.phase in (READY, RETIRED):
            yield what, after
        else:
            yield from ((f"{what}; {more}", end) for more, end in daemon_steps(setup, after))


def _observe(setup: Setup, s: State) -> Iterator[Outcome]:
    """Takes what messages have come; barrier; reads every `published`.

    A dead client's socket has ended, so it is not attached any more.
    """
    dead = sum(1 << c for c, x in enumerate(s.clients) if x.at == "dead")
    attached = s.attached & ~dead
    joining = next((1 << c for c, x in enumerate(s.clients) if x.at == "attaching"), 0)
    seen = [{x.published} if attached >> c & 1 else {NONE} for c, x in enumerate(s.clients)]
    if setup.broken == "barrier" and s.snapshot:
        # Whatever a client has stored since the last step may still be in its store buffer.
        seen = [now | {last} for now, last in zip(seen, s.snapshot, strict=True)]
    s = s._replace(phase=OBSERVED, attached=attached, joining=joining)
    on_their_way = (True, False) if setup.slow_post else (False,)
    for late in product(*(on_their_way if x.mail else (True,) for x in s.clients)):
        after = s
        for c, x in enumerate(s.clients):
            if not late[c]:
                asked = x.asked | x.mail if attached >> c & 1 else 0
                after = after.client(c, mail=0, asked=asked)
        for snapshot in product(*seen):
            yield f"reads published {snapshot}", after._replace(snapshot=snapshot)


def _without_left_sections(s: State, inside: int) -> State:
    """Reads every `section`: pins and fetches of sections that are over go."""
    slots = tuple(x._replace(pins=x.pins & inside, old_pins=0) for x in s.slots)
    clients = tuple(
        x._replace(asked=x.asked & (inside >> c & THIS_SECTION)) for c, x in enumerate(s.clients)
    )
    return s._replace(slots=slots, clients=clients)


def _give(setup: Setup, s: State) -> Iterator[Outcome]:
    """Reads every `section`; LIMBO to FREE; pins what is there; gives slots in some order."""
    inside = sum(1 << c for c, epoch in enumerate(s.snapshot) if epoch)
    s = _without_left_sections(s, inside)
    oldest = min((epoch for epoch in s.snapshot if epoch), default=s.epoch)
    slots = [
        Slot(readers=x.readers) if x.kind == LIMBO and x.stamp <= oldest else x for x in s.slots
    ]
    asking = [c for c, x in enumerate(s.clients) if x.asked & THIS_SECTION]
    s = s._replace(slots=tuple(slots), phase=GIVEN)
    for c in asking:
        s = _pinned(setup, s, c)
    for order in permutations(asking):
        after, given = s, ""
        for c in order:
            what, after = _serve(setup, after, c)
            given += what
        yield f"gives{given or ' nothing'}", after
    if setup.prefetch and _room_ahead(setup, s) > 0 and _may_give(setup, s, None):
        yield "prefetches", _overwritten(s, Slot(READING, held=True))


def _serve(setup: Setup, s: State, c: int) -> Outcome:
    """Gives client `c` slots for what it has asked for, as many as the rules allow."""
    s, given = _pinned(setup, s, c), ""
    for expert in _unmet(s, c):
        if not _may_give(setup, s, c):
            return given, s
        pins = 0 if setup.broken == "pin" else 1 << c
        s = _overwritten(s, Slot(READING, expert, pins=pins))
        given += f" client {c} a slot for expert {expert},"
    return given, s.client(c, asked=0)


def _pinned(setup: Setup, s: State, c: int) -> State:
    """Pins what client `c` has missed and a slot holds by now, or will when its read is done."""
    missed = {expert for expert, _ in s.clients[c].misses}
    if setup.broken == "pin":
        return s
    slots = tuple(
        # Who joins a read takes it over; a slab that is there stays held besides.
        x._replace(pins=x.pins | 1 << c, held=x.held and x.kind == LIVE)
        if x.expert in missed and x.kind in (LIVE, READING)
        else x
        for x in s.slots
    )
    return s._replace(slots=slots)


def _room_ahead(setup: Setup, s: State) -> int:
    """How many more slots may be held: those beyond `2 x w x clients`."""
    if setup.broken == "prefetch has a share":
        return setup.slots
    floor = 2 * setup.wave * (s.attached | s.joining).bit_count()
    return setup.slots - floor - sum(x.held for x in s.slots)


def _unmet(s: State, c: int) -> list[int]:
    """What client `c` has missed and no slot holds, or is about to."""
    resident = {x.expert for x in s.slots if x.kind in (LIVE, READING)}
    return [expert for expert, _ in s.clients[c].misses if expert not in resident]


def _may_give(setup: Setup, s: State, c: int | None) -> bool:
    """Whether the reserve and the sections older than client `c`'s can spare a FREE slot.

    Prefetch, which has no client, is younger than every section.
    """
    free, limbo = s.count(FREE), s.count(LIMBO)
    if setup.broken == "reserve" or (c is None and setup.broken == "prefetch leaves the reserve"):
        return free > 0
    age = (s.epoch + 1, 0) if c is None else (s.snapshot[c], c)
    shares = 0
    for y, epoch in enumerate(s.snapshot):
        if epoch and y != c and ((epoch, y) < age or setup.broken == "age"):
            shares += setup.wave - sum((x.pins | x.old_pins) >> y & 1 for x in s.slots)
    kept = free - 1 + limbo
    if setup.broken == "surplus":
        kept += len(_victims(s))
    return free > shares and kept >= setup.wave * s.attached.bit_count()


def _overwritten(s: State, new: Slot) -> State:
    """A FREE slot is read into: the one whose loss is worst, for all may be the one."""
    i = max((i for i, x in enumerate(s.slots) if x.kind == FREE), key=lambda i: s.slots[i].readers)
    readers = s.slots[i].readers
    for c, x in enumerate(s.clients):
        if readers >> c & 1:
            if not x.revoked:
                raise ProtocolBroken(f"slot {i} is overwritten, and client {c} may be reading it")
            s = s.client(c, torn=True)
    return s._replace(slots=(*s.slots[:i], new, *s.slots[i + 1 :]))


def _victims(s: State) -> list[int]:
    return [
        i for i, x in enumerate(s.slots) if x.kind == LIVE and not (x.pins | x.old_pins or x.held)
    ]


def _retire(setup: Setup, s: State) -> Iterator[Outcome]:
    """`table = -1` for any victims: for the reserve, a newcomer, and the next step's gifts."""
    victims, idle = _victims(s), s.count(FREE) + s.count(LIMBO)
    unmet = sum(len(_unmet(s, c)) for c, x in enumerate(s.clients) if x.asked & THIS_SECTION)
    wanted = setup.wave * s.attached.bit_count() + unmet
    if setup.broken == "surplus":
        wanted -= unmet
    if setup.broken == "reserve":
        wanted = unmet
    elif s.joining:
        newcomer = setup.wave * (s.attached.bit_count() + 1)
        if newcomer <= idle + len(victims):
            wanted = max(wanted, newcomer)
        else:
            s = s._replace(joining=0)
    counts = {min(max(wanted - idle, 0), len(victims))}
    if setup.prefetch and _room_ahead(setup, s) > 0:
        counts.add(min(max(wanted + 1 - idle, 0), len(victims)))
    for count in sorted(counts):
        yield from _retire_count(setup, s, victims, count)


def _retire_count(setup: Setup, s: State, victims: list[int], count: int) -> Iterator[Outcome]:
    if not count:
        yield "ends its step", _ended(setup, s)
        return
    choices = {tuple(s.slots[i] for i in chosen): chosen for chosen in combinations(victims, count)}
    for chosen in choices.values():
        slots = tuple(
            Slot(LIMBO, readers=x.readers) if i in chosen else x for i, x in enumerate(s.slots)
        )
        yield f"takes slots {chosen} out", s._replace(slots=slots, phase=RETIRED)


def _move_epoch(setup: Setup, s: State) -> Iterator[Outcome]:
    """`epoch += 1`, the stamps, and the end of the step."""
    epoch = s.epoch + 1
    slots = [x._replace(stamp=epoch) if x.kind == LIMBO and x.stamp == NONE else x for x in s.slots]
    if setup.broken == "grace period":
        slots = [Slot(readers=x.readers) if x.kind == LIMBO else x for x in slots]
    yield "epoch += 1; ends its step", _ended(setup, s._replace(epoch=epoch, slots=tuple(slots)))


def _ended(setup: Setup, s: State) -> State:
    """Reads are submitted and a newcomer gets its answer, if the reserve is whole."""
    attached = s.attached | s.joining
    idle = s.count(FREE) + s.count(LIMBO)
    taken = setup.broken in ("reserve", "prefetch leaves the reserve")
    if idle < setup.wave * attached.bit_count() and not taken:
        raise ProtocolBroken(f"a step ends with {idle} slots FREE or in LIMBO")
    for c, x in enumerate(s.clients):
        if s.joining >> c & 1 and x.at == "attaching":
            s = s.client(c, at="idle")
            slots = (y._replace(held=y.held and y.kind == READING) for y in s.slots)
            s = s._replace(slots=tuple(slots))
    snapshot = s.snapshot if setup.broken == "barrier" else ()
    return s._replace(phase=READY, attached=attached, joining=0, snapshot=snapshot)


def published(setup: Setup, s: State, i: int) -> State:
    """The read to slot `i` is done; it is not held if a client has come and needs its floor."""
    lacking = _room_ahead(setup, s) < 0
    return s.slot(i, kind=LIVE, held=s.slots[i].held and not lacking)


def revocations(setup: Setup, s: State) -> Iterator[Outcome]:
    """A client that has stopped, and keeps a slot in LIMBO while another waits, is revoked.

    Not while it waits itself: then it is not the cause.
    """
    if setup.broken == "revocation":
        return
    stamp = max((x.stamp for x in s.slots if x.kind == LIMBO), default=NONE)
    for c, me in enumerate(s.clients):
        waits = bool(me.asked) or any(x.kind == READING and x.pins >> c & 1 for x in s.slots)
        blocks = bool(s.attached >> c & 1) and NONE < me.published < stamp
        others_wait = any(x.asked & THIS_SECTION for y, x in enumerate(s.clients) if y != c)
        if me.stalled and blocks and others_wait and not waits:
            rest = ~(1 << c)
            slots = tuple(
                x._replace(pins=x.pins & rest, old_pins=x.old_pins & rest) for x in s.slots
            )
            after = s._replace(slots=slots, attached=s.attached & rest)
            yield f"revokes client {c}", after.client(c, revoked=True, asked=0)
