"""The attached clients: numbers, tickets, and what is refused."""

import itertools
import os
import resource
import socket
from contextlib import contextmanager, suppress

import pytest

from shared.errors import ClientRevoked, DaemonBusy
from shared.residency import MAX_CLIENTS, NONE_EPOCH, ClientArea, TableShape
from shared.shm import map_writable
from streamd.sessions import Sessions
from streamd.tiers.descriptors import RESERVE_COUNT

MAX_RINGS = 4096
SHAPE = TableShape(2, 16)


@pytest.fixture
def sessions():
    sessions = Sessions(SHAPE)
    yield sessions
    sessions.close()


def come(sessions, pid=1):
    session = sessions.prepare(pid)
    sessions.add(session)
    return session


def go(sessions, session):
    sessions.remove(session.ticket)
    session.close()


def test_numbers_are_the_smallest_free_ones_and_tickets_are_new(sessions):
    first, second, third = (come(sessions) for _ in range(3))
    assert [session.number for session in (first, second, third)] == [0, 1, 2]
    go(sessions, second)
    again = come(sessions)
    assert again.number == second.number
    tickets = {session.ticket for session in (first, second, third, again)}
    assert len(tickets) == 4
    assert len(sessions) == 3
    assert {session.ticket for session in sessions} == tickets - {second.ticket}


@pytest.mark.timeout(20)
def test_a_client_that_does_not_read_its_doorbell_does_not_stop_the_daemon(sessions):
    """Nor one that fills the other way, or that asks for writes to wait for room."""
    session = come(sessions)
    theirs = session.doorbell
    theirs.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            theirs.send(bytes(1 << 16))
    theirs.setblocking(True)
    for _ in range(20_000):
        session.ring()
    assert set(theirs.recv(MAX_RINGS)) == {0}


def test_a_client_may_shut_its_doorbell(sessions):
    session = come(sessions)
    session.doorbell.shutdown(socket.SHUT_RDWR)
    session.ring()


def test_tickets_are_not_to_be_guessed():
    """From those that one has had: a member of a group is not each other member's friend."""
    sessions = Sessions(SHAPE)
    tickets = [come(sessions).ticket for _ in range(MAX_CLIENTS)]
    sessions.close()
    steps = {abs(later - earlier) for earlier, later in itertools.pairwise(tickets)}
    assert len(steps) == MAX_CLIENTS - 1
    assert min(steps) > 2**40
    assert max(tickets) < 2**63


def test_another_daemon_gives_other_tickets():
    tickets = set()
    for _ in range(5):
        sessions = Sessions(SHAPE)
        tickets.add(come(sessions).ticket)
        sessions.close()
    assert len(tickets) == 5


def test_a_session_is_found_by_ticket_and_number(sessions):
    session = come(sessions, pid=77)
    assert sessions.of_ticket(session.ticket) is sessions.of_number(session.number) is session
    assert session.pid == 77


@pytest.mark.parametrize("fate", ["never came", "left", "was revoked"])
def test_a_ticket_that_is_not_served(sessions, fate):
    session = come(sessions)
    ticket = session.ticket
    if fate == "never came":
        ticket += 1
    elif fate == "left":
        go(sessions, session)
    else:
        session.revoked = True
    with pytest.raises(ClientRevoked) as refusal:
        sessions.of_ticket(ticket)
    assert refusal.value.remedy == "attach again"


def test_where_prompts_have_got_to(sessions):
    clients = [come(sessions) for _ in range(5)]
    assert sessions.scan_layers() == []
    for client, layer in zip(clients, (1, 0, 1, 0, None), strict=True):
        client.area.scan_layer = layer
    clients[3].revoked = True
    assert sessions.scan_layers() == [0, 1]
    go(sessions, clients[1])
    assert sessions.scan_layers() == [1]


def test_the_most_clients_there_may_be(sessions):
    """One that was revoked keeps its number until it has gone: it looks at its flag there."""
    everybody = [come(sessions) for _ in range(MAX_CLIENTS)]
    everybody[3].revoked = True
    with pytest.raises(DaemonBusy, match=f"{MAX_CLIENTS} clients are attached"):
        sessions.prepare(1)
    go(sessions, everybody[3])
    assert come(sessions).number == 3


def test_the_area_is_shared_by_its_descriptor(sessions):
    session = come(sessions)
    theirs = ClientArea(map_writable(session.region.fd, SHAPE.area_bytes), SHAPE)
    assert theirs.published == NONE_EPOCH
    theirs.count_tokens(5)
    assert session.area.tokens == 5


def test_rings_are_heard_by_those_who_are_rung(sessions):
    first, second = come(sessions), come(sessions)
    sessions.ring([second.number])
    sessions.ring([second.number])
    assert len(second.doorbell.recv(MAX_RINGS)) == 2
    with pytest.raises(BlockingIOError):
        first.doorbell.recv(MAX_RINGS, socket.MSG_DONTWAIT)


@contextmanager
def descriptors_left(count):
    """Of the process's limit on open files all but `count` are taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(taken[0]))
        for fd in taken[len(taken) - count :]:
            os.close(fd)
        del taken[len(taken) - count :]
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("count", [1, RESERVE_COUNT // 2, RESERVE_COUNT - 1])
def test_with_too_few_descriptors_a_client_is_refused_and_nothing_leaks(sessions, count):
    open_before = os.listdir("/proc/self/fd")
    with descriptors_left(count), pytest.raises(DaemonBusy) as refusal:
        sessions.prepare(1)
    assert "ulimit -n" in refusal.value.remedy
    assert os.listdir("/proc/self/fd") == open_before


def test_with_enough_of_them_one_is_let_in(sessions):
    with descriptors_left(RESERVE_COUNT + 1):
        come(sessions)
