"""The daemon's two sockets: everything is bounded and answered, and nothing ends the daemon."""

import os
import random
import socket
import tempfile
from pathlib import Path
from typing import get_type_hints

import msgpack
import pytest
import zmq

from shared.errors import DaemonBusy, RequestError
from shared.runtime_dir import Endpoints
from shared.wire import (
    MAX_MESSAGE_BYTES,
    Attach,
    Attached,
    Failed,
    Fetch,
    Hint,
    Refused,
    Stats,
    StatsRequest,
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

PATIENCE_MS = 10_000
TICKET = 4242


def a_message(kind, **values):
    """Of a kind with more fields than matter here: 0, "" and [] in the others."""
    return kind(**{name: hint() for name, hint in get_type_hints(kind).items()} | values)


class FakeDaemon:
    """Attaches everybody, with one descriptor; answers questions as `answers` says."""

    def __init__(self):
        self.refusal = None
        self.answers = {}
        self.heard = []
        self.detached = []
        self.tickets = iter(range(TICKET, TICKET + 1000))

    def attach(self, message):
        if self.refusal is not None:
            raise self.refusal
        attached = a_message(Attached, ticket=next(self.tickets))
        return attached, [self.descriptor]

    def detach(self, ticket):
        self.detached.append(ticket)

    def request(self, message):
        self.heard.append(message)
        answer = self.answers.get(type(message))
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def daemon():
    daemon = FakeDaemon()
    daemon.descriptor = os.eventfd(7)
    yield daemon
    os.close(daemon.descriptor)


@pytest.fixture
def endpoints():
    with tempfile.TemporaryDirectory(prefix="ct-") as directory:
        yield Endpoints(Path(directory), "test")


@pytest.fixture
def control(daemon, endpoints):
    control = Control(endpoints, daemon)
    yield control
    control.close()


@pytest.fixture
def dealer(control, endpoints):
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoints.zmq_url)
        yield dealer


@pytest.fixture
def connect(control, endpoints):
    made = []

    def connection():
        made.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        made[-1].settimeout(PATIENCE_MS / 1000)
        made[-1].connect(str(endpoints.unix_path))
        control.poll(PATIENCE_MS)
        return made[-1]

    yield connection
    for one in made:
        one.close()


def ask(control, dealer, *frames):
    dealer.send_multipart(frames)
    control.poll(PATIENCE_MS)
    assert dealer.poll(PATIENCE_MS)
    return decode(dealer.recv())


def say(control, connection, frame):
    """The answer, and the descriptors that come with it."""
    connection.send(frame)
    control.poll(PATIENCE_MS)
    answer, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 4)
    return decode(answer), descriptors


def has_ended(connection):
    return connection.recv(1) == b""


ATTACH = encode(a_message(Attach, pid=1))


# Requests


def test_a_question_is_answered(control, daemon, dealer):
    daemon.answers[StatsRequest] = Stats({"hits": 3})
    assert ask(control, dealer, encode(StatsRequest())) == Stats({"hits": 3})


def test_a_refusal_is_an_answer(control, daemon, dealer):
    daemon.answers[Stop] = RequestError("not now", "ask later")
    assert ask(control, dealer, encode(Stop())) == Refused("request", "not now", "ask later")


@pytest.mark.parametrize(
    "message", [a_message(Attach, pid=1), Fetch(TICKET, 1, 2, [3]), Hint(TICKET, 1, 2, [3])]
)
def test_what_belongs_to_an_attachment_is_not_taken_from_anybody(control, daemon, dealer, message):
    """ZeroMQ does not say who sends it."""
    answer = ask(control, dealer, encode(message))
    assert answer.code == "protocol"
    assert daemon.heard == []


def test_garbage_is_refused_and_does_no_harm(control, daemon, dealer):
    rng = random.Random(3)
    frames = [b"", b"\xc1", encode(Stop())[:-1], msgpack.packb([99, "Stop", {}])]
    frames += [rng.randbytes(rng.randint(1, 80)) for _ in range(100)]
    for frame in frames:
        answer = ask(control, dealer, frame)
        assert isinstance(answer, Refused)
        assert answer.code == "protocol"
    assert daemon.heard == []


def test_messages_of_more_frames_are_passed_over(control, daemon, dealer):
    daemon.answers[StatsRequest] = Stats({})
    dealer.send_multipart([b"", encode(StatsRequest())])
    dealer.send_multipart([encode(StatsRequest())] * 3)
    assert ask(control, dealer, encode(StatsRequest())) == Stats({})
    assert len(daemon.heard) == 1


def test_many_requests_at_once_are_all_answered(control, daemon, dealer):
    daemon.answers[StatsRequest] = Stats({})
    for _ in range(600):
        dealer.send(encode(StatsRequest()))
    answer_count = 0
    while answer_count < 600:
        control.poll(PATIENCE_MS)
        while dealer.poll(0):
            dealer.recv()
            answer_count += 1
    assert len(daemon.heard) == 600


# The unix socket


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
    messages = [Fetch(TICKET, 1, 2, [3]), Hint(TICKET, 2, 3, [4, 5]), Fetch(TICKET, 2, 3, [4])]
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


def test_who_does_not_listen_holds_nobody_up(control, daemon, connect):
    connection = attached(control, connect)
    for number in range(10_000):
        control.tell(TICKET, Failed(number, 2, 3, "read-failed", "no", ""))
    connection.send(encode(Fetch(TICKET, 1, 2, [3])))
    control.poll(PATIENCE_MS)
    assert daemon.heard[-1] == Fetch(TICKET, 1, 2, [3])


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


def test_other_descriptors_are_watched(control):
    bell, reactions = os.eventfd(0), []
    control.watch(bell, lambda: reactions.append(os.eventfd_read(bell)))
    os.eventfd_write(bell, 5)
    control.poll(PATIENCE_MS)
    assert reactions == [5]
    control.unwatch(bell)
    os.eventfd_write(bell, 1)
    control.poll(0)
    assert reactions == [5]
    os.close(bell)
