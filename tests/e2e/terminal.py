"""A terminal with `infer chat` in it, and the person before it."""

import codecs
import os
import pty
import re
import select
import sysconfig
import time
from pathlib import Path

DEADLINE_S = 60.0
PROMPT = r"\n>"
CTRL_C, CTRL_D = "\x03", "\x04"
# What a terminal is told beside text: control sequences, and moves within the line.
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\x08]")


class Terminal:
    """`infer chat` on a pseudo-terminal, and the person before it."""

    def __init__(self, place, *words: object) -> None:
        self._master, slave = pty.openpty()
        infer = Path(sysconfig.get_path("scripts"), "infer")
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        self.process = place.start("on_terminal.py", infer, "chat", *words, **streams)
        os.close(slave)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._unread = ""
        self.greeting = ""  # what was shown before the first prompt

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def enter(self, line: str) -> None:
        self.type(line + "\r")

    def read_until(self, pattern: str) -> str:
        """What has appeared since the last call, up to the end of the first match."""
        end_s = time.monotonic() + DEADLINE_S
        while not (match := re.search(pattern, _CONTROLS.sub("", self._unread))):
            left_s = end_s - time.monotonic()
            ready, _, _ = select.select([self._master], [], [], max(0, left_s))
            try:
                assert ready, "nothing more appears"
                self._unread += self._decoder.decode(os.read(self._master, 4096))
            except (AssertionError, OSError) as error:  # EIO: the program has ended
                raise AssertionError(f"{pattern!r} is not in {self._unread!r}") from error
        text = _CONTROLS.sub("", self._unread)
        self._unread = text[match.end() :]
        return text[: match.end()]

    def close(self) -> None:
        os.close(self._master)
