"""How much of past conversations is kept on disk, as `--kv-sessions` says it."""

from dataclasses import dataclass

from shared.sizes import parse_size

DEFAULT_SESSION_COUNT = 8
DEFAULT_SESSION_BYTES = 8 << 30
MAX_SESSION_COUNT = 1000


@dataclass(frozen=True)
class KvLimits:
    """Of the conversations that are kept by themselves; those saved by name are the user's."""

    session_count: int = DEFAULT_SESSION_COUNT
    size_bytes: int = DEFAULT_SESSION_BYTES

    def __bool__(self) -> bool:
        return self.session_count > 0 and self.size_bytes > 0


def parse_kv_sessions(text: str) -> KvLimits:
    """'off', a number of conversations, or their size together such as 2G."""
    if text == "off":
        return KvLimits(0, 0)
    try:
        if not text.isdecimal():
            return KvLimits(MAX_SESSION_COUNT, parse_size(text))
        if int(text) <= MAX_SESSION_COUNT:
            return KvLimits(session_count=int(text))
    except ValueError:  # it speaks of sizes alone
        pass
    raise ValueError(
        f"give off, up to {MAX_SESSION_COUNT} conversations, or a size with its unit such as 2G"
    )
