"""Every interleaving of docs/protocol.md for small numbers, and what happens without its rules."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from exploration import Violation, explore
from slot_state import BROKEN, LIMBO, LIVE, NONE, READING, SECTION, Setup, State

FLOOR = Setup(clients=2, wave=1, slots=4, abandoners=0)  # 2 x wave x clients slots

ABOVE_FLOOR = replace(FLOOR, slots=5, prefetch=True)
ALONE = Setup(clients=1, wave=1, slots=2, prefetch=True)


def someone_waits_for_whom_limbo_waits(s: State) -> bool:
    stamp = max((x.stamp for x in s.slots if x.kind == LIMBO), default=NONE)
    return any(c.asked and c.published < stamp for c in s.clients)


def hits_are_in_limbo(s: State) -> bool:
    return any(x.kind == LIMBO and x.readers for x in s.slots)


def nobody_waits_for_a_read(s: State) -> bool:
    return any(x.kind == READING and not x.pins for x in s.slots)


def a_slot_is_held(s: State) -> bool:
    return any(x.kind == LIVE and x.held for x in s.slots)


def newcomer_is_in_a_section(s: State) -> bool:
    return s.attached == 0b11 and s.clients[1].at in SECTION


def slot_of_a_revoked_client_is_torn(s: State) -> bool:
    return any(c.revoked and c.torn for c in s.clients)


def both_attached_after_a_revocation(s: State) -> bool:
    return s.attached == 0b11 and not s.faults_left and not any(c.stalled for c in s.clients)


def a_read_is_left_by_the_dead(s: State) -> bool:
    return any(c.at == "dead" for c in s.clients) and nobody_waits_for_a_read(s)


def old_memory_is_read_while_new_is_filled(s: State) -> bool:
    old = any(c.lost and c.at == "compute" for c in s.clients)
    return old and any(x.kind == READING for x in s.slots)


def half_of_a_wave_is_there(s: State) -> bool:
    return any(c.at == "wait" and any(found for _, found in c.misses) for c in s.clients)


def three_wait(s: State) -> bool:
    return sum(c.at == "wait" for c in s.clients) == 3


# What to explore, at least how many states there are, and what some of them have to show.
SOUND: dict[str, tuple[Setup, int, list[Callable[[State], bool]]]] = {
    "two clients at the floor": (
        FLOOR,
        5_000,
        [someone_waits_for_whom_limbo_waits, hits_are_in_limbo],
    ),
    "sections abandoned, slow messages": (
        replace(FLOOR, abandoners=0b11, slow_post=True),
        50_000,
        [someone_waits_for_whom_limbo_waits, nobody_waits_for_a_read],
    ),
    "clients between all parts of the daemon's step": (
        replace(FLOOR, split=True, slow_post=True, sections=(2, 2)),
        30_000,
        [someone_waits_for_whom_limbo_waits],
    ),
    "prefetch": (ABOVE_FLOOR, 10_000, [nobody_waits_for_a_read, a_slot_is_held]),
    "prefetch for one client": (replace(ALONE, wave=2, slots=6), 3_000, [a_slot_is_held]),
    "a late client where slots are held": (
        replace(ABOVE_FLOOR, late=True, sections=(1, 1)),
        10_000,
        [newcomer_is_in_a_section, a_slot_is_held],
    ),
    "a failed read": (
        replace(FLOOR, fault="failed read"),
        10_000,
        [someone_waits_for_whom_limbo_waits],
    ),
    "a late client": (replace(FLOOR, late=True), 5_000, [newcomer_is_in_a_section]),
    "a client stops, for ever or not": (
        replace(FLOOR, fault="stall"),
        30_000,
        [slot_of_a_revoked_client_is_torn, both_attached_after_a_revocation],
    ),
    "a client dies": (replace(FLOOR, fault="death"), 5_000, [a_read_is_left_by_the_dead]),
    "the daemon restarts": (
        replace(FLOOR, fault="restart"),
        10_000,
        [old_memory_is_read_while_new_is_filled],
    ),
    "one client, wave of two": (
        Setup(clients=1, wave=2, slots=4),
        500,
        [half_of_a_wave_is_there, hits_are_in_limbo],
    ),
    "two clients, waves of two": (
        Setup(clients=2, wave=2, slots=8, warm=True, abandoners=0, sections=(1, 1)),
        5_000,
        [half_of_a_wave_is_there, someone_waits_for_whom_limbo_waits],
    ),
    "two clients, waves of two, none of it cached": (
        Setup(clients=2, wave=2, slots=8, warm=True, only_new_experts=True, abandoners=0),
        2_000,
        [half_of_a_wave_is_there, someone_waits_for_whom_limbo_waits],
    ),
    "three clients, nothing cached": (
        Setup(
            clients=3,
            slots=6,
            warm=True,
            only_new_experts=True,
            sections=(1, 1, 1),
            abandoners=0,
        ),
        20_000,
        [three_wait, someone_waits_for_whom_limbo_waits],
    ),
}

OVERWRITTEN = "may be reading it"
TORN = "uses the result of a torn read"
STARVED = "may wait for ever"
UNSOUND = {
    "barrier": (FLOOR, OVERWRITTEN),
    "grace period": (FLOOR, OVERWRITTEN),
    "pin": (FLOOR, STARVED),
    "reserve": (FLOOR, STARVED),
    "surplus": (replace(FLOOR, only_new_experts=True, abandoners=0b11), STARVED),
    "age": (FLOOR, STARVED),
    "prefetch leaves the reserve": (replace(ALONE, slots=3), STARVED),
    "prefetch has a share": (ALONE, STARVED),
    "re-read": (replace(ABOVE_FLOOR, sections=(1, 1)), STARVED),
    "revocation": (replace(FLOOR, fault="stall"), STARVED),
    "revoked check": (replace(FLOOR, fault="stall"), TORN),
    "revoked ends the wait": (replace(FLOOR, fault="stall"), STARVED),
}


@pytest.mark.parametrize("name", SOUND)
def test_protocol_holds(name: str) -> None:
    setup, least_states, shown = SOUND[name]
    states = explore(setup)
    assert len(states) >= least_states
    for what in shown:
        assert any(map(what, states)), what.__name__


@pytest.mark.parametrize("rule", BROKEN)
def test_protocol_breaks_without(rule: str) -> None:
    setup, why = UNSOUND[rule]
    with pytest.raises(Violation, match=why) as violation:
        explore(replace(setup, broken=rule))
    assert str(violation.value).startswith("client 0 section += 1\n"), "no trace from the start"
