"""HOST:PORT as an option."""

from typing import NamedTuple

MAX_PORT = 65535
_EXPECTED = "give HOST:PORT such as 127.0.0.1:9464 or [::1]:9464"


class Address(NamedTuple):
    """Where a TCP server listens; port 0 lets the system choose one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """ValueError unless it names both; an IPv6 address stands in brackets."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not (colon and host and port.isascii() and port.isdecimal() and int(port) <= MAX_PORT):
        raise ValueError(_EXPECTED)
    if (":" in host) != bracketed:
        raise ValueError(_EXPECTED)
    return Address(host, int(port))
