"""Bounded sequential reads from the head of a GGUF file.

The file is read, not mapped: one that is truncated meanwhile must be an error, not a SIGBUS.
Nothing is allocated before its size is checked against the file's end and MAX_HEADER_BYTES, so a
hostile file costs bounded memory and time.
"""

import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.errors import MalformedModel, ModelChanged, ModelError, ReadFailed

MAX_HEADER_BYTES = 128 << 20  # a real one with 150,000 tokens and 300,000 merges: 12 MB
MAX_ARRAY_STRINGS = 1 << 21  # of all string arrays together; real ones: up to 800,000
READ_AHEAD_BYTES = 1 << 20
WALK_WINDOW_BYTES = 1 << 16
MAX_SHOWN_CHARS = 80

_STRUCTS = {code: struct.Struct(f"<{code}") for code in "BbHhIifd?Qq"}
_U64 = _STRUCTS["Q"]


def shown(text: str) -> str:
    """A text from a file as messages quote it: no control characters, not endless."""
    return ascii(text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "...")


@contextmanager
def open_model_file(path: Path) -> Iterator[int]:
    """A read-only descriptor of a regular file; ModelError where there is none."""
    try:
        # O_NONBLOCK: opening a FIFO must not wait for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ModelError(
            f"cannot open {path}: {error.strerror}", "check the path and its permissions"
        ) from error
    except ValueError as error:  # a NUL in the path
        raise ModelError(f"cannot open {shown(str(path))}: {error}", "check the path") from error
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise ModelError(f"{path} is a directory", "name the .gguf file in it")
        if not stat.S_ISREG(mode):
            raise ModelError(f"{path} is not a regular file", "name a .gguf file")
        yield fd
    finally:
        os.close(fd)


class HeaderReader:
    """A cursor over the bytes of `fd` from `start` on; positions count from `start`.

    Raises MalformedModel where the file or MAX_HEADER_BYTES ends before the value does.
    """

    def __init__(self, fd: int, path: Path, start: int = 0) -> None:
        self.path = path
        self.position = 0
        self._fd = fd
        self._start = start
        self._file_bytes = os.fstat(fd).st_size - start
        self._strings_left = MAX_ARRAY_STRINGS
        self._data = bytearray()

    @property
    def remaining_bytes(self) -> int:
        """What the file still has behind the cursor."""
        return self._file_bytes - self.position

    def malformed(self, message: str) -> MalformedModel:
        return MalformedModel(f"{self.path}: {message}", "convert or download the model again")

    def number(self, code: str) -> Any:
        """The next little-endian scalar; `code` as in `struct`."""
        layout = _STRUCTS[code]
        position = self._step(layout.size)
        return layout.unpack_from(self._data, position)[0]

    def raw(self, byte_count: int) -> bytes:
        position = self._step(byte_count)
        return bytes(self._data[position : self.position])

    def string(self) -> bytes:
        """length u64 | bytes"""
        return self.raw(self.number("Q"))

    def skip(self, byte_count: int) -> None:
        self._step(byte_count)

    def skip_strings(self, count: int) -> None:
        self._string_bounds(count)

    def strings(self, count: int) -> list[str]:
        """The next `count` strings. Bytes that are not UTF-8 become lone surrogates, losslessly."""
        bounds = self._string_bounds(count).tolist()
        data = bytes(self._data)
        return [
            str(data[head + _U64.size : end], "utf-8", "surrogateescape")
            for head, end in pairwise(bounds)
        ]

    def _string_bounds(self, count: int) -> NDArray[np.int64]:
        """Step over `count` strings; where each begins and the last ends, int64 [count + 1]."""
        if count > self._strings_left:
            raise self.malformed(f"more than {MAX_ARRAY_STRINGS:,} strings in arrays")
        self._strings_left -= count
        parts: list[NDArray[np.int64]] = []
        while count:
            self._load(self.position + _U64.size)
            stop = min(self.position + WALK_WINDOW_BYTES, self._file_bytes, MAX_HEADER_BYTES)
            self._load(stop)
            # Nearly always the first walk gets through the window, all but its last string.
            for walk in (self._walk_short, self._walk_any):
                heads = walk(count, stop)
                parts.append(heads)
                count -= len(heads)
        return np.concatenate([*parts, [self.position]])

    def _walk_short(self, count: int, stop: int) -> NDArray[np.int64]:
        """Step over the leading strings of 1..255 bytes without zeros, all heads found at once.

        Such a head is one byte and then seven zeros, and nothing else there looks like one. That
        each head found leads to the next is checked, so the result never rests on the guess.
        """
        window = np.frombuffer(self._data, np.uint8, stop - self.position, self.position)
        zero = window[1:] == 0
        pairs = zero[:-1] & zero[1:]
        fours = pairs[:-2] & pairs[2:]
        heads = np.flatnonzero(fours[:-3] & fours[3:])
        if heads.size == 0 or heads[0] != 0:
            return np.empty(0, np.int64)
        ends = heads + _U64.size + window[heads]
        broken = np.flatnonzero(ends[:-1] != heads[1:])
        chained_count = min(count, broken[0] + 1 if broken.size else heads.size)
        heads = heads[:chained_count] + self.position
        del window  # the buffer cannot grow while a view of it exists
        self._step(int(ends[chained_count - 1]))
        return heads

    def _walk_any(self, count: int, stop: int) -> NDArray[np.int64]:
        """Step over strings one by one, as long as they begin before `stop`."""
        heads: list[int] = []
        while len(heads) < count and self.position < stop:
            heads.append(self.position)
            self._step(self.number("Q"))
        return np.array(heads, np.int64)

    def _step(self, byte_count: int) -> int:
        """Load `byte_count` bytes and move behind them; the position where they begin."""
        position = self.position
        self._load(position + byte_count)
        self.position = position + byte_count
        return position

    def _load(self, end: int) -> None:
        """Make the bytes before `end` available."""
        if end <= len(self._data):
            return
        if end > self._file_bytes:
            raise MalformedModel(
                f"{self.path}: the file ends inside its header",
                "the download is incomplete; fetch the file again",
            )
        if end > MAX_HEADER_BYTES:
            raise self.malformed(f"its header is larger than {MAX_HEADER_BYTES >> 20} MiB")
        wanted = min(max(end, len(self._data) + READ_AHEAD_BYTES), self._file_bytes)
        while len(self._data) < wanted:
            position = len(self._data)
            try:
                chunk = os.pread(self._fd, wanted - position, self._start + position)
            except OSError as error:
                raise ReadFailed(
                    f"reading {self.path} at {self._start + position} failed: {error.strerror}",
                    "check the disk and the system log",
                ) from error
            if not chunk:
                raise ModelChanged(f"{self.path} shrank while it was read", "try again")
            self._data += chunk
