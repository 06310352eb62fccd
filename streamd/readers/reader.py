"""Reads slabs: splits them into aligned reads, keeps the engine busy, puts short reads right.

    submit(slab) --> pieces waiting, first in first out --> at most `depth` in the engine
                          ^                                        |
                          +---- the rest of a short read ----------+--> slab complete: poll()

An extent is read from the aligned offset before it to the aligned offset after it, because direct
I/O wants offset, length and memory aligned:

    file      start         offset                offset + length     end
                |<- delta ->|<------ payload ------>|<--- tail --->|
    target      0

so its payload begins at `target[offset % align_bytes]`, and a target of
`roundup(align_bytes + length, align_bytes)` bytes is always enough. Buffered files are read in the
same way, so that the payload does not move.
"""

import errno
import os
import select
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator

from shared.errors import ModelChanged, ReadFailed, StreamError
from streamd.readers.direct import OpenFile
from streamd.readers.engine import Engine, address_of
from streamd.readers.latency import LatencyHistogram
from streamd.readers.slab_read import Completion, Extent, ReadStats, SlabRead

PIECE_BYTES = 4 << 20
QUEUE_MAX_SLABS = 4096
TRIES_MAX = 16
"""How often a read may end without a byte of progress before it counts as failed."""

CLOSE_PATIENCE_S = 5.0


class _Slab:
    """A slab on its way. It is complete when no piece of it waits or is in flight."""

    __slots__ = ("bytes_read", "error", "key", "pieces_left", "submitted_s", "useful_bytes")

    def __init__(self, key: Hashable, submitted_s: float, useful_bytes: int) -> None:
        self.key = key
        self.submitted_s = submitted_s
        self.useful_bytes = useful_bytes
        self.bytes_read = 0
        self.pieces_left = 0
        self.error: StreamError | None = None


class _Piece:
    """One aligned read: `target.nbytes` bytes at `offset`, of which the first `needed` matter."""

    __slots__ = ("file", "needed", "offset", "slab", "started_s", "target", "tries")

    def __init__(
        self, slab: _Slab, file: OpenFile, offset: int, target: memoryview, needed: int
    ) -> None:
        self.slab = slab
        self.file = file
        self.offset = offset
        self.target = target
        self.needed = needed
        self.tries = 0
        self.started_s = 0.0

    def advance(self, step: int) -> None:
        """Leaves off the first `step` bytes, which have been read; `step` keeps the alignment."""
        if step:
            self.tries = 0
            self.offset += step
            self.needed -= step
            self.target = self.target[step:]


class Reader:
    """Used by one thread, which waits for `fileno()` and then calls `poll()`; nothing here waits.

    Its files may stand on different disks: `align_bytes`, the largest of their alignments, holds
    for all of them. The engine is closed with the reader, the files stay the caller's.
    """

    def __init__(
        self,
        engine: Engine,
        files: list[OpenFile],
        depth: int,
        *,
        piece_bytes: int = PIECE_BYTES,
        queue_max_slabs: int = QUEUE_MAX_SLABS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.align_bytes = max(file.align_bytes for file in files)
        assert 0 < depth <= engine.depth
        assert piece_bytes % self.align_bytes == 0
        self.depth = depth
        self._engine = engine
        self._files = files
        self._piece_bytes = piece_bytes
        self._queue_max_slabs = queue_max_slabs
        self._clock = clock
        self._slabs: dict[Hashable, _Slab] = {}
        self._waiting: deque[_Piece] = deque()
        self._in_flight: dict[int, _Piece] = {}
        self._next_token = 0
        self._latency = LatencyHistogram()
        self._reads = self._bytes_read = self._useful_bytes = self._in_flight_bytes = 0
        self._retries = self._failed_slabs = 0

    def fileno(self) -> int:
        """Readable when `poll` has something to do."""
        return self._engine.fileno()

    @property
    def room(self) -> int:
        """How many more slabs `submit` takes before some complete."""
        return self._queue_max_slabs - len(self._slabs)

    def submit(self, request: SlabRead) -> None:
        """Queues a slab; exactly one Completion with its key comes from a later `poll`."""
        assert self.room > 0
        assert request.key not in self._slabs
        useful_bytes = sum(extent.length for extent in request.extents)
        assert useful_bytes > 0
        slab = _Slab(request.key, self._clock(), useful_bytes)
        for extent in request.extents:
            for piece in self._pieces(slab, extent):
                slab.pieces_left += 1
                self._waiting.append(piece)
        self._slabs[request.key] = slab
        self._pump()

    def cancel(self, key: Hashable) -> bool:
        """Withdraws what the engine has not been given of a slab.

        True: nothing of it was in flight; it is forgotten and will not complete. False: it will
        complete, with an error if a part of it was withdrawn; until then its targets are in use.
        """
        slab = self._slabs[key]
        withdrawn_count = self._withdraw(slab)
        if slab.pieces_left == 0:
            del self._slabs[key]
            return True
        if withdrawn_count and slab.error is None:
            slab.error = ReadFailed("the read was cancelled")
        return False

    def poll(self) -> list[Completion]:
        """Takes what has ended, hands the engine what waits; the slabs completed by that."""
        completions = []
        for token, result in self._engine.reap():
            piece = self._in_flight.pop(token)
            self._count(piece, result)
            slab = piece.slab
            if self._settle(piece, result):
                slab.pieces_left -= 1
            else:
                self._retries += 1
                self._waiting.appendleft(piece)  # its slab has waited long enough
            if slab.pieces_left == 0:
                completions.append(self._complete(slab))
        self._pump()
        return completions

    def stats(self) -> ReadStats:
        return ReadStats(
            engine=self._engine.name,
            reads=self._reads,
            bytes_read=self._bytes_read,
            useful_bytes=self._useful_bytes,
            retries=self._retries,
            failed_slabs=self._failed_slabs,
            in_flight_bytes=self._in_flight_bytes,
            in_flight_reads=len(self._in_flight),
            waiting_reads=len(self._waiting),
            latency_ms_p50=self._latency.percentile_ms(50),
            latency_ms_p99=self._latency.percentile_ms(99),
        )

    def close(self, patience_s: float = CLOSE_PATIENCE_S) -> bool:
        """Drops what waits and lets what is in flight land, for at most `patience_s`.

        False: a disk did not answer in time; the targets may still be written to.
        """
        self._waiting.clear()
        deadline_s = time.monotonic() + patience_s
        bell = select.poll()
        bell.register(self.fileno(), select.POLLIN)
        while self._in_flight and (left_s := deadline_s - time.monotonic()) > 0:
            bell.poll(left_s * 1000)
            for token, _ in self._engine.reap():
                del self._in_flight[token]
        self._engine.close()
        return not self._in_flight

    def _pieces(self, slab: _Slab, extent: Extent) -> Iterator[_Piece]:
        if extent.length == 0:
            return
        file, align = self._files[extent.file_index], self.align_bytes
        stop = extent.offset + extent.length
        assert 0 <= extent.offset < stop <= file.size_bytes
        start, end = extent.offset // align * align, -(-stop // align) * align
        assert end - start <= extent.target.nbytes
        assert address_of(extent.target) % align == 0
        for offset in range(start, end, self._piece_bytes):
            size = min(self._piece_bytes, end - offset)
            target = extent.target[offset - start : offset - start + size]
            yield _Piece(slab, file, offset, target, min(size, stop - offset))

    def _pump(self) -> None:
        while self._waiting and len(self._in_flight) < self.depth:
            piece = self._waiting.popleft()
            piece.started_s = self._clock()
            self._in_flight[self._next_token] = piece
            self._in_flight_bytes += piece.target.nbytes
            self._engine.submit(self._next_token, piece.file.fd, piece.target, piece.offset)
            self._next_token += 1
        self._engine.flush()

    def _count(self, piece: _Piece, result: int) -> None:
        self._latency.add((self._clock() - piece.started_s) * 1000)
        self._in_flight_bytes -= piece.target.nbytes
        self._reads += 1
        if result > 0:
            self._bytes_read += result
            piece.slab.bytes_read += result
            if not piece.file.direct:
                piece.file.forget(piece.offset, result)

    def _settle(self, piece: _Piece, result: int) -> bool:
        """True: the piece has ended, well or with its slab's error. False: read what is left."""
        if result >= piece.needed:
            return True  # a widened read may end short at the end of the file
        piece.tries += 1
        piece.advance(max(result, 0) // self.align_bytes * self.align_bytes)
        error = _failure(piece, result)
        if error is not None and piece.slab.error is None:
            piece.slab.error = error
        if piece.slab.error is None:
            return False
        self._withdraw(piece.slab)
        return True

    def _withdraw(self, slab: _Slab) -> int:
        kept = deque(piece for piece in self._waiting if piece.slab is not slab)
        withdrawn_count = len(self._waiting) - len(kept)
        self._waiting = kept
        slab.pieces_left -= withdrawn_count
        return withdrawn_count

    def _complete(self, slab: _Slab) -> Completion:
        del self._slabs[slab.key]
        if slab.error is None:
            self._useful_bytes += slab.useful_bytes
        else:
            self._failed_slabs += 1
        latency_ms = (self._clock() - slab.submitted_s) * 1000
        return Completion(slab.key, slab.error, slab.bytes_read, latency_ms)


def _failure(piece: _Piece, result: int) -> StreamError | None:
    """Why reading on is pointless after `result`, which was too short or -errno; or None."""
    where = f"{piece.file.path} at byte {piece.offset}"
    if result < 0 and -result not in (errno.EINTR, errno.EAGAIN):
        return ReadFailed(
            f"reading {where} failed: {os.strerror(-result)} (errno {-result})",
            "check the disk and the kernel's log",
        )
    try:
        change = piece.file.change() if result >= 0 else ""
    except OSError as error:
        return ReadFailed(f"reading {where} failed: {error.strerror} (errno {error.errno})")
    if change:
        return ModelChanged(change, "restart the daemon with the file as it is now")
    if piece.tries < TRIES_MAX:
        return None
    got = "short reads" if result >= 0 else os.strerror(-result)
    return ReadFailed(f"reading {where} failed: {got}, {TRIES_MAX} times", "check the disk")
