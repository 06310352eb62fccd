"""What the tests of the daemon's sockets share: a daemon that is none, and how it is talked to."""

import socket
from typing import get_type_hints

from shared.wire import MAX_MESSAGE_BYTES, Attach, Attached, decode, encode

PATIENCE_MS = 10_000
TICKET = 4242  # of the first client


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


def say(control, connection, frame):
    """The answer, and the descriptors that come with it."""
    connection.send(frame)
    control.poll(PATIENCE_MS)
    answer, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 4)
    return decode(answer), descriptors


def has_ended(connection):
    return connection.recv(1) == b""


ATTACH = encode(a_message(Attach, pid=1))
