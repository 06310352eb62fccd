"""The attached clients: a number, a ticket, an area of memory and a doorbell each."""

import secrets
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from shared.errors import ClientRevoked, DaemonBusy
from shared.residency import MAX_CLIENTS, ClientArea, TableShape
from shared.wire import HOST_TIER
from streamd.tiers.descriptors import check_left
from streamd.tiers.regions import AreaRegion

# By chance, so that none is given twice, by this daemon or the next, and nobody guesses another's.
_TICKET_BITS = 62


@dataclass
class Session:
    """One attached client. `number` indexes the table's `revoked`; `ticket` is never used again.

    doorbell: the client's end of what it waits at; bell: ours. A socket pair, because each end has
    flags of its own: a client that shared ours could make us wait for room in it.
    tier: whose slots it computes from.
    """

    ticket: int
    number: int
    pid: int
    region: AreaRegion
    area: ClientArea
    doorbell: socket.socket
    bell: socket.socket
    tier: str = HOST_TIER
    revoked: bool = False

    def ring(self) -> None:
        with suppress(OSError):  # full: it is ringing already; or the client has shut it
            self.bell.send(b"\0", socket.MSG_DONTWAIT)

    def close(self) -> None:
        self.region.close()
        self.doorbell.close()
        self.bell.close()


class Sessions:
    def __init__(self, shape: TableShape) -> None:
        self._shape = shape
        self._by_ticket: dict[int, Session] = {}
        self._by_number: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._by_ticket)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_ticket.values())

    def prepare(self, pid: int, tier: str = HOST_TIER) -> Session:
        """A session with its resources, not registered yet; a StreamError if it gets none."""
        check_left()
        number = next((n for n in range(MAX_CLIENTS) if n not in self._by_number), None)
        if number is None:
            raise DaemonBusy(
                f"{MAX_CLIENTS} clients are attached, the most there may be", "end another client"
            )
        region = AreaRegion(self._shape.area_bytes)
        area = ClientArea(region.memory, self._shape)
        area.initialise()
        try:
            doorbell, bell = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            region.close()
            raise DaemonBusy(
                f"no descriptor for one more client: {error.strerror}",
                "raise the daemon's limit on open files (ulimit -n)",
            ) from error
        ticket = secrets.randbits(_TICKET_BITS)
        return Session(ticket, number, pid, region, area, doorbell, bell, tier)

    def add(self, session: Session) -> None:
        self._by_ticket[session.ticket] = session
        self._by_number[session.number] = session

    def remove(self, ticket: int) -> Session:
        session = self._by_ticket.pop(ticket)
        del self._by_number[session.number]
        return session

    def of_ticket(self, ticket: int) -> Session:
        """Raises ClientRevoked for a ticket that is not, or no longer, served."""
        session = self.find(ticket)
        if session is None:
            raise ClientRevoked("the daemon does not know this client any more", "attach again")
        return session

    def find(self, ticket: int) -> Session | None:
        """None for a ticket that is not, or no longer, served."""
        session = self._by_ticket.get(ticket)
        return None if session is None or session.revoked else session

    def of_number(self, number: int) -> Session:
        return self._by_number[number]

    def scan_layers(self) -> list[int]:
        """The layers that prompts of theirs have reached."""
        found = (session.area.scan_layer for session in self if not session.revoked)
        return sorted({layer for layer in found if layer is not None})

    def ring(self, numbers: Iterable[int]) -> None:
        """The sessions among the clients; the daemon's own look at the table themselves."""
        for number in numbers:
            if number < MAX_CLIENTS:
                self._by_number[number].ring()

    def close(self) -> None:
        for session in self:
            session.close()
        self._by_ticket.clear()
        self._by_number.clear()
