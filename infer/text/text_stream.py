"""Token ids, one by one, to text that may be shown at once."""

import codecs
from collections.abc import Sequence

from infer.text.tokenizer import Tokenizer
from shared.errors import RequestError

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024


class TextStream:
    """Decodes an answer as it is generated.

    A character split over tokens is held until it is whole; bytes that can become none are U+FFFD.
    `stop_strings` end the text: the first to be complete, in reading order, wins; the earliest
    beginning among those complete at one character. Neither it nor what follows is given out,
    however tokens divide it: what may yet become a stop string is held back.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()) -> None:
        """Raises RequestError for empty, too long or too many stop strings."""
        if len(stop_strings) > MAX_STOP_STRINGS:
            raise RequestError(
                f"{len(stop_strings)} stop strings are too many", f"give at most {MAX_STOP_STRINGS}"
            )
        for stop in stop_strings:
            if not 0 < len(stop) <= MAX_STOP_CHARS:
                raise RequestError(
                    f"a stop string has {len(stop)} characters", f"give 1 to {MAX_STOP_CHARS}"
                )
        self._tokenizer = tokenizer
        self._stops = tuple(stop_strings)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped_by: str | None = None

    def feed(self, token: int) -> str:
        """The text that `token` makes certain, often none. Nothing after a stop string."""
        return self._pass(self._characters.decode(self._tokenizer.token_bytes(token)))

    def flush(self) -> str:
        """What was still held, at the end of the answer; an unfinished character is U+FFFD."""
        text = self._pass(self._characters.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _pass(self, text: str) -> str:
        if self.stopped_by is not None:
            return ""
        self._held += text
        found = [(at + len(s), at, s) for s in self._stops if (at := self._held.find(s)) >= 0]
        if found:
            _, at, self.stopped_by = min(found)
            safe, self._held = self._held[:at], ""
            return safe
        keep = max((_begun(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe


def _begun(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
