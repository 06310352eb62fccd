"""What a client of the model does: attach, and one section after another."""

from collections.abc import Iterator

from slot_state import (
    EARLIER_SECTION,
    LIVE,
    NONE,
    READING,
    THIS_SECTION,
    Client,
    ProtocolBroken,
    Setup,
    State,
)


def client_steps(setup: Setup, s: State, c: int) -> Iterator[tuple[str, bool, State]]:
    """What client `c` may do next; whether it has to do something in the end."""
    me = s.clients[c]
    match me.at:
        case "away":
            yield "wants to attach", False, s.client(c, at="attaching")
        case "idle" | "leave" if me.lost:
            yield "sees end-of-file", True, attaching_again(s, c)
        case "idle" if me.sections_left:
            yield "section += 1", False, begun(s, c)
        case "begun":
            yield "reads epoch", True, s.client(c, at="epoch read", read=s.epoch)
        case "epoch read":
            yield "stores published", True, s.client(c, at="published", published=me.read)
        case "published" if me.read == s.epoch or setup.broken == "re-read":
            yield "epoch is the same", True, s.client(c, at="lookup", read=NONE)
        case "published":
            yield "epoch has moved", True, s.client(c, at="epoch read", read=s.epoch)
        case "lookup":
            for what, after in _lookups(setup, s, c):
                yield what, True, after
        case "send":
            yield "sends fetch", True, s.client(c, at="wait", mail=me.mail | THIS_SECTION)
        case "wait":
            if me.lost or (me.revoked and setup.broken != "revoked ends the wait"):
                yield "gives up waiting", True, attaching_again(s, c)
            for what, after in _arrivals(s, c):
                yield what, True, after
            if setup.abandoners >> c & 1:
                yield "abandons", False, reads_done(s, c).client(c, at="leave")
        case "compute":
            yield "has read its slots", True, reads_done(s, c).client(c, at="check")
        case "check" if me.revoked and setup.broken != "revoked check":
            yield "throws its result away", True, attaching_again(s, c)
        case "check" if me.torn:
            raise ProtocolBroken(f"client {c} uses the result of a torn read")
        case "check":
            yield "uses its result", True, s.client(c, at="leave")
        case "leave":
            yield "published = NONE", True, s.client(c, at="idle", published=NONE, torn=False)
            if me.sections_left:
                yield "section += 1", True, begun(s, c)


def _lookups(setup: Setup, s: State, c: int) -> Iterator[tuple[str, State]]:
    """One expert is looked up, any that this section has not looked up yet.

    Which it is gets decided only here: one in a slot, one that another client misses too, or one
    that nobody thinks of.
    """
    me = s.clients[c]
    if me.lost:
        yield "hits in the old memory", s.client(c, at="compute")
        yield "misses in the old memory", s.client(c, at="send")
        return
    mine = {expert for expert, _ in me.misses}
    missed = {expert for x in s.clients for expert, _ in x.misses}
    resident = {x.expert for x in s.slots if x.kind in (LIVE, READING)}
    unnamed = max(missed, default=0) + 1

    def looked_up(after: State, *expert: int) -> State:
        misses = me.misses + tuple((e, False) for e in expert)
        if me.looked_up + 1 < setup.wave:
            return after.client(c, looked_up=me.looked_up + 1, misses=misses)
        at = "send" if misses else "compute"
        return after.client(c, at=at, looked_up=0, misses=misses)

    yield f"misses expert {unnamed}", looked_up(s, unnamed)
    if setup.only_new_experts:
        return
    for i, x in s.unlike_slots():
        if x.expert in mine:
            continue
        if x.kind == LIVE and not x.readers >> c & 1:
            yield f"hits slot {i}", looked_up(s.slot(i, readers=x.readers | 1 << c))
        elif x.kind == READING:
            expert = x.expert or unnamed
            yield f"misses the expert read to slot {i}", looked_up(s.slot(i, expert=expert), expert)
    for expert in missed - resident - mine:
        yield f"misses expert {expert}", looked_up(s, expert)


def _arrivals(s: State, c: int) -> Iterator[tuple[str, State]]:
    """One of the misses is seen in the table."""
    misses = s.clients[c].misses
    for k, (expert, found) in enumerate(misses):
        for i, x in enumerate(s.slots):
            if not found and x.kind == LIVE and x.expert == expert:
                now = (*misses[:k], (expert, True), *misses[k + 1 :])
                at = "compute" if all(found for _, found in now) else "wait"
                after = s.slot(i, readers=x.readers | 1 << c)
                yield f"finds expert {expert} in slot {i}", after.client(c, misses=now, at=at)


def reads_done(s: State, c: int) -> State:
    """Client `c` reads no slot any longer."""
    slots = tuple(
        x._replace(readers=x.readers & ~(1 << c)) if x.readers >> c & 1 else x for x in s.slots
    )
    return s._replace(slots=slots)


def begun(s: State, c: int) -> State:
    """`section += 1`: what belonged to this section belongs to an earlier one."""
    me, bit = s.clients[c], 1 << c
    slots = tuple(
        x._replace(pins=x.pins & ~bit, old_pins=x.old_pins | bit) if x.pins & bit else x
        for x in s.slots
    )
    client = me._replace(
        at="begun",
        sections_left=me.sections_left - (me.sections_left > 0),
        misses=(),
        mail=EARLIER_SECTION if me.mail else 0,
        asked=EARLIER_SECTION if me.asked else 0,
        torn=False,
    )
    clients = (*s.clients[:c], client, *s.clients[c + 1 :])
    return s._replace(clients=clients, slots=slots)


def attaching_again(s: State, c: int) -> State:
    """The section is given up; what was asked under the old number stays of an earlier section."""
    s = begun(reads_done(s, c), c)
    me = s.clients[c]
    fresh = Client("attaching", me.sections_left, mail=me.mail, asked=me.asked)
    return s._replace(clients=(*s.clients[:c], fresh, *s.clients[c + 1 :]))
