"""Clients' connections: who is let in, what is heard over them and told, and how they end."""

import os
import socket

import pytest
from control_bench import ATTACH, PATIENCE_MS, TICKET, has_ended, say

from shared.errors import DaemonBusy, RequestError
from shared.wire import (
    MAX_MESSAGE_BYTES,
    Attach,
    Attached,
    Failed,
    Fetch,
    Hint,
    Refused,
    Stop,
    decode,
    encode,
)
from streamd.control import (
    MAX_CONNECTIONS,
    MAX_FRAME_BYTES,
    MAX_REQUESTS_PER_CONNECTION,
    MAX_TURNED_AWAY,
    Control,
)


def test_attaching_hands_out_descriptors(control, daemon, connect):
    answer, (descriptor,) = say(control, connect(), ATTACH)
    assert answer.ticket == TICKET
    assert os.eventfd_read(descriptor) == 7
    os.close(descriptor)


def test_the_end_of_a_connection_is_the_end_of_its_client(control, daemon, connect):
    connection = connect()
    _, (descriptor,) = say(control, connection, ATTACH)
    os.close(descriptor)
    assert daemon.detached == []
    connection.close()
    control.poll(PATIENCE_MS)
    assert daemon.detached == [TICKET]


def test_one_that_never_attached_ends_unnoticed(control, daemon, connect):
    connect().close()
    control.poll(PATIENCE_MS)
    assert daemon.detached == []


def test_a_refused_client_is_told_why_and_hung_up_on(control, daemon, connect):
    daemon.refusal = DaemonBusy("no room", "end another client")
    connection = connect()
    answer, descriptors = say(control, connection, ATTACH)
    assert (answer.error().message, descriptors) == ("no room", [])
    assert has_ended(connection)
    assert daemon.detached == []


@pytest.mark.parametrize(
    "frame",
    [b"\x00", b"\xff" * 100, encode(Stop()), bytes(MAX_FRAME_BYTES + 1)],
    ids=["a byte", "more bytes", "another kind", "too long"],
)
def test_anything_but_attach_is_refused(control, connect, frame):
    connection = connect()
    answer, _ = say(control, connection, frame)
    assert answer.code == "protocol"
    assert has_ended(connection)


def attached(control, connect):
    connection = connect()
    _, (descriptor,) = say(control, connection, ATTACH)
    os.close(descriptor)
    return connection


def test_an_attached_client_fetches_over_its_connection(control, daemon, connect):
    connection = attached(control, connect)
    messages = [Fetch(TICKET, 1, 2, [3]), Hint(TICKET, 2, 3, [4, 5], 2), Fetch(TICKET, 2, 3, [4])]
    for message in messages:
        connection.send(encode(message))
    control.poll(PATIENCE_MS)
    assert daemon.heard == messages


def test_an_attached_client_can_be_told(control, connect):
    connection = attached(control, connect)
    failed = Failed(1, 2, 3, "read-failed", "no", "")
    control.tell(TICKET, failed)
    control.tell(TICKET + 1, failed)  # has gone
    assert decode(connection.recv(MAX_MESSAGE_BYTES)) == failed


def test_who_does_not_listen_holds_nobody_up(control, daemon, connect, caplog):
    connection = attached(control, connect)
    for number in range(10_000):
        control.tell(TICKET, Failed(number, 2, 3, "read-failed", "no", ""))
    connection.send(encode(Fetch(TICKET, 1, 2, [3])))
    control.poll(PATIENCE_MS)
    assert daemon.heard[-1] == Fetch(TICKET, 1, 2, [3])
    assert len(caplog.messages) == 1
    assert str(TICKET) not in caplog.text


def test_what_is_wrong_with_its_fetch_is_told(control, daemon, connect):
    daemon.answers[Fetch] = RequestError("no such expert", "ask for another")
    connection = attached(control, connect)
    answer, _ = say(control, connection, encode(Fetch(TICKET, 1, 2, [3])))
    assert answer == Refused("request", "no such expert", "ask for another")
    assert daemon.detached == []


@pytest.mark.parametrize(
    "frame",
    [encode(Fetch(TICKET + 1, 1, 2, [3])), encode(Stop()), b"\xc1", bytes(MAX_FRAME_BYTES + 1)],
    ids=["for another client", "another kind", "garbage", "too long"],
)
def test_an_attached_connection_takes_nothing_else(control, daemon, connect, frame):
    connection = attached(control, connect)
    answer, _ = say(control, connection, frame)
    assert answer.code == "protocol"
    assert has_ended(connection)
    assert daemon.detached == [TICKET]
    assert all(isinstance(message, Attach) for message in daemon.heard)


def test_a_flood_over_a_connection_leaves_time_for_others(control, daemon, connect):
    connection = attached(control, connect)
    for _ in range(2 * MAX_REQUESTS_PER_CONNECTION):
        connection.send(encode(Fetch(TICKET, 1, 2, [3])))
    for turn in (1, 2):
        control.poll(PATIENCE_MS)
        assert len(daemon.heard) == turn * MAX_REQUESTS_PER_CONNECTION


def test_attaching_twice_over_one_connection_ends_the_first(control, daemon, connect):
    connection = connect()
    _, (descriptor,) = say(control, connection, ATTACH)
    os.close(descriptor)
    answer, _ = say(control, connection, ATTACH)
    assert "attached already" in answer.message
    assert has_ended(connection)
    assert daemon.detached == [TICKET]


def test_a_connection_too_many_is_refused(control, daemon, connect):
    first = connect()
    for _ in range(MAX_CONNECTIONS - 1):
        connect()
    one_too_many = connect()
    answer, _ = say(control, one_too_many, ATTACH)
    assert "connections are open" in answer.message
    assert answer.remedy
    assert has_ended(one_too_many)
    first.close()
    control.poll(PATIENCE_MS)
    answer, (descriptor,) = say(control, connect(), ATTACH)
    assert isinstance(answer, Attached)
    os.close(descriptor)


def test_a_crowd_of_them_is_hung_up_on(control, daemon, connect):
    for _ in range(MAX_CONNECTIONS + MAX_TURNED_AWAY):
        connect()
    assert has_ended(connect())


def test_closing_hangs_up_on_everybody(daemon, endpoints):
    control = Control(endpoints, daemon)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(endpoints.unix_path))
        control.poll(PATIENCE_MS)
        _, (descriptor,) = say(control, connection, ATTACH)
        os.close(descriptor)
        control.close()
        assert has_ended(connection)
    assert daemon.detached == [TICKET]
