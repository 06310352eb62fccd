"""The reads that a slab is made of.

An extent is read from the aligned offset before it to the aligned offset after it, because direct
I/O wants offset, length and memory aligned:

    file      start         offset                offset + length     end
                |<- delta ->|<------ payload ------>|<--- tail --->|
    target      0

so its payload begins at `target[offset % align_bytes]`, and `target` holds
`roundup(align_bytes + length, align_bytes)` bytes at most. Buffered files are read the same way.
"""

import errno
import os
from collections.abc import Hashable, Iterator

from shared.errors import ModelChanged, ReadFailed, StreamError
from shared.fingerprint import RELOAD
from streamd.readers.direct import OpenFile
from streamd.readers.engine import address_of
from streamd.readers.slab_read import Extent, Priority

TRIES_MAX = 16
"""How often a read may end without a byte of progress before it counts as failed."""


class Slab:
    """A slab on its way. It is complete when no piece of it waits or is in flight."""

    __slots__ = (
        *("bytes_read", "error", "files", "key", "owner", "pieces_left", "priority"),
        *("submitted_s", "useful_bytes"),
    )

    def __init__(
        self, key: Hashable, priority: Priority, submitted_s: float, owner: int = 0
    ) -> None:
        self.key = key
        self.owner = owner
        self.priority = priority
        self.submitted_s = submitted_s
        self.useful_bytes = 0
        self.bytes_read = 0
        self.pieces_left = 0
        self.error: StreamError | None = None
        self.files: list[OpenFile] = []  # each once


class Piece:
    """One aligned read: `target.nbytes` bytes at `offset`, of which the first `needed` matter."""

    __slots__ = ("charged_to", "file", "needed", "offset", "slab", "started_s", "target", "tries")

    def __init__(
        self, slab: Slab, file: OpenFile, offset: int, target: memoryview, needed: int
    ) -> None:
        self.slab = slab
        self.file = file
        self.offset = offset
        self.target = target
        self.needed = needed
        self.tries = 0
        self.started_s = 0.0
        self.charged_to = int(slab.priority)  # whose share of the bytes in flight it takes

    def advance(self, step: int) -> None:
        """Leaves off the first `step` bytes, which have been read; `step` keeps the alignment."""
        if step:
            self.tries = 0
            self.offset += step
            self.needed -= step
            self.target = self.target[step:]


def split(
    slab: Slab, extent: Extent, file: OpenFile, align: int, piece_bytes: int
) -> Iterator[Piece]:
    """The widened reads of an extent, none longer than `piece_bytes`; nothing for an empty one."""
    if extent.length == 0:
        return
    stop = extent.offset + extent.length
    assert 0 <= extent.offset < stop <= file.size_bytes
    start, end = extent.offset // align * align, -(-stop // align) * align
    assert end - start <= extent.target.nbytes
    assert address_of(extent.target) % align == 0
    for offset in range(start, end, piece_bytes):
        size = min(piece_bytes, end - offset)
        target = extent.target[offset - start : offset - start + size]
        yield Piece(slab, file, offset, target, min(size, stop - offset))


def failure_of(piece: Piece, result: int) -> StreamError | None:
    """Why reading on is pointless after `result`, which was too short or -errno; or None."""
    where = f"{piece.file.path} at byte {piece.offset}"
    if result < 0 and -result not in (errno.EINTR, errno.EAGAIN):
        return ReadFailed(
            f"reading {where} failed: {os.strerror(-result)} (errno {-result})",
            "check the disk and the kernel's log",
        )
    if result >= 0 and (error := change_of(piece.file)) is not None:
        return error
    if piece.tries < TRIES_MAX:
        return None
    got = "short reads" if result >= 0 else os.strerror(-result)
    return ReadFailed(f"reading {where} failed: {got}, {TRIES_MAX} times", "check the disk")


def change_of(file: OpenFile) -> StreamError | None:
    """ModelChanged if the file is not what it was when it was opened, ReadFailed if it is gone."""
    try:
        change = file.change()
    except OSError as error:
        return ReadFailed(
            f"looking at {file.path} failed: {error.strerror} (errno {error.errno})",
            "check the disk",
        )
    if not change:
        return None
    return ModelChanged(change, RELOAD)
