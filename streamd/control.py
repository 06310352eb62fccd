"""The daemon's ears: its two sockets, and the connections behind them.

The unix socket hands out descriptors and tells when a client dies; the ZeroMQ socket carries
requests and answers. What an attached client needs at once, and what it is told of that, goes over
its unix connection, which the main loop reads itself: over ZeroMQ two more threads have to wake up
first. What a message means is the Handler's business; here it is made sure that each one is
bounded, well-formed and answered, refusals too.
"""

import array
import logging
import select
import socket
from collections.abc import Callable
from typing import Protocol

import zmq

from shared.errors import DaemonBusy, ProtocolMismatch, StreamError
from shared.residency import MAX_CLIENTS
from shared.runtime_dir import Endpoints
from shared.wire import (
    MAX_MESSAGE_BYTES,
    Attach,
    Attached,
    Fetch,
    Hint,
    Message,
    Refused,
    decode,
    encode,
)
from streamd.peers import is_admitted

log = logging.getLogger(__name__)

# Connections that have not attached (yet) count too.
MAX_CONNECTIONS = 2 * MAX_CLIENTS
# Beyond those: told so when they ask to attach. Closed before it has asked, a client would see
# no answer.
MAX_TURNED_AWAY = 32
# Of a message over the unix socket.
MAX_FRAME_BYTES = 1 << 16
# Requests taken in one turn of the main loop, so that a flood does not hold up completions.
MAX_REQUESTS_PER_TURN = 256
MAX_REQUESTS_PER_CONNECTION = 16
REQUEST_QUEUE_LENGTH = 4096
# select() knows only descriptors below it.
SELECTABLE_COUNT = 1024
# Of so many naps one looks for requests over ZeroMQ, which cannot end it.
NAPS_A_LOOK = 16


class Handler(Protocol):
    """What the daemon does about a message. StreamErrors become refusals."""

    def attach(self, message: Attach) -> tuple[Attached, list[int]]: ...

    def detach(self, ticket: int) -> None: ...

    def request(self, message: Message) -> Message | None: ...


class Control:
    def __init__(self, endpoints: Endpoints, handler: Handler) -> None:
        self._handler = handler
        self._gid = endpoints.gid
        self._connections: dict[int, socket.socket] = {}
        self._deaf = False  # whether new connections are left waiting
        self._tickets: dict[int, int] = {}  # descriptor -> ticket
        self._unheard: set[int] = set()  # descriptors of those that have missed something
        self._watched: dict[int, Callable[[], None]] = {}
        self._context = zmq.Context(io_threads=1)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._router.setsockopt(zmq.RCVHWM, REQUEST_QUEUE_LENGTH)
        self._router.setsockopt(zmq.SNDHWM, REQUEST_QUEUE_LENGTH)
        self._router.bind(endpoints.zmq_url)
        endpoints.admit(endpoints.zmq_path)  # ZeroMQ asks nobody who he is
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        endpoints.unix_path.unlink(missing_ok=True)  # from before a reload: the name is ours
        self._listener.bind(str(endpoints.unix_path))
        endpoints.admit(endpoints.unix_path)
        self._listener.listen(MAX_CONNECTIONS)
        self._listener.setblocking(False)
        self._descriptors = select.epoll()  # of all but the router
        self._descriptors.register(self._listener.fileno(), select.EPOLLIN)
        self._nap_count = 0
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._descriptors.fileno(), zmq.POLLIN)

    def watch(self, fd: int, react: Callable[[], None]) -> None:
        """Call `react` from `poll` when `fd` is readable."""
        self._watched[fd] = react
        self._descriptors.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        del self._watched[fd]
        self._descriptors.unregister(fd)

    def nap(self, seconds: float) -> None:
        """As `poll`, for less than a millisecond; requests over ZeroMQ may be left for later."""
        if self._descriptors.fileno() >= SELECTABLE_COUNT:
            self.poll(1)
            return
        if select.select([self._descriptors], [], [], seconds)[0]:
            self._take_events()
        self._nap_count += 1
        if self._nap_count % NAPS_A_LOOK == 0:
            self._take_requests()

    def poll(self, timeout_ms: int) -> None:
        """Wait for something to happen, at most so long, and deal with all of it."""
        for ready, _ in self._poller.poll(timeout_ms):
            if ready is self._router:
                self._take_requests()
            else:
                self._take_events()

    def _take_events(self) -> None:
        """Deal with the descriptors that are readable now."""
        for fd, _ in self._descriptors.poll(0):
            if fd in self._connections:
                self._hear(fd)
            elif fd in self._watched:
                self._watched[fd]()
            elif fd == self._listener.fileno():
                self._accept()

    def tell(self, ticket: int, message: Message) -> None:
        """Send to an attached client; one that has gone or does not read misses it."""
        for fd, theirs in self._tickets.items():
            if theirs == ticket and not self._reply(self._connections[fd], message, []):
                self._note_unheard(fd, message)

    def _note_unheard(self, fd: int, message: Message) -> None:
        """Said once of each connection: who does not read must not fill the log."""
        if fd not in self._unheard:
            self._unheard.add(fd)
            log.warning("a client that does not read what it is told misses %s", message)

    def close(self) -> None:
        for fd in list(self._connections):
            self._hang_up(fd)
        self._listener.close()
        self._descriptors.close()
        self._router.close()
        self._context.term()

    # ZeroMQ

    def _take_requests(self) -> None:
        for _ in range(MAX_REQUESTS_PER_TURN):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            answer = self._answer(frames[1]) if len(frames) == 2 else None
            if answer is not None:
                self._send(frames[0], answer)

    def _answer(self, frame: bytes) -> Message | None:
        try:
            message = decode(frame)
            if isinstance(message, Attach | Fetch | Hint):
                raise ProtocolMismatch("what a client attaches with goes over the unix socket")
            return self._handler.request(message)
        except StreamError as error:
            return Refused.because(error)

    def _send(self, identity: bytes, message: Message) -> None:
        try:
            self._router.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.warning("an answer could not be delivered: %s", error)

    # The unix socket

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            # Out of descriptors: the connection stays ready, so it is looked at again only when
            # another one has gone.
            log.warning("a connection could not be accepted: %s", error)
            self._descriptors.unregister(self._listener.fileno())
            self._deaf = True
            return
        connection.setblocking(False)
        crowded = len(self._connections) >= MAX_CONNECTIONS + MAX_TURNED_AWAY
        if crowded or not is_admitted(connection, self._gid):
            connection.close()
        else:
            self._connections[connection.fileno()] = connection
            self._descriptors.register(connection.fileno(), select.EPOLLIN)

    def _hear(self, fd: int) -> None:
        """A connection is readable: a message, or the end of the client."""
        connection = self._connections[fd]
        for _ in range(MAX_REQUESTS_PER_CONNECTION):
            try:
                frame = connection.recv(MAX_FRAME_BYTES)
            except BlockingIOError:
                return
            except OSError:
                frame = b""
            if not frame:
                self._hang_up(fd)
                return
            if fd not in self._tickets:
                self._attach(fd, connection, frame)
                return
            try:
                self._take_own(self._tickets[fd], frame)
            except StreamError as error:
                self._reply(connection, Refused.because(error), [])
                self._hang_up(fd)
                return

    def _take_own(self, ticket: int, frame: bytes) -> None:
        """A request of the client with that ticket; ProtocolMismatch for what is none."""
        message = decode(frame)
        if isinstance(message, Attach):
            raise ProtocolMismatch("this connection is attached already")
        if not isinstance(message, Fetch | Hint) or message.ticket != ticket:
            raise ProtocolMismatch("an attached connection takes fetches and hints of its own")
        try:
            self._handler.request(message)
        except StreamError as error:
            self.tell(ticket, Refused.because(error))

    def _attach(self, fd: int, connection: socket.socket, frame: bytes) -> None:
        try:
            if len(self._connections) > MAX_CONNECTIONS:
                raise DaemonBusy(
                    f"{MAX_CONNECTIONS} connections are open, the most there may be",
                    "end another client",
                )
            message = decode(frame)
            if not isinstance(message, Attach):
                raise ProtocolMismatch("the unix socket takes attach messages only")
            attached, descriptors = self._handler.attach(message)
        except StreamError as error:
            self._reply(connection, Refused.because(error), [])
            self._hang_up(fd)
            return
        self._tickets[fd] = attached.ticket
        if not self._reply(connection, attached, descriptors):
            self._hang_up(fd)

    def _hang_up(self, fd: int) -> None:
        connection = self._connections.pop(fd)
        self._descriptors.unregister(fd)
        if self._deaf:
            self._deaf = False
            self._descriptors.register(self._listener.fileno(), select.EPOLLIN)
        ticket = self._tickets.pop(fd, None)
        self._unheard.discard(fd)
        connection.close()
        if ticket is not None:
            self._handler.detach(ticket)

    @staticmethod
    def _reply(connection: socket.socket, message: Message, descriptors: list[int]) -> bool:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        try:
            connection.sendmsg([encode(message)], ancillary if descriptors else [])
        except OSError:
            return False
        return True
