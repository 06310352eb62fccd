"""Reads slabs: splits them into aligned reads, keeps the engine busy, puts short reads right.

submit(slab) --> pieces waiting, by priority --> so many bytes in flight as the disk can use
                      ^                                        |
                      +---- the rest of a short read ----------+--> slab complete: poll()
"""

import select
import time
from collections.abc import Callable, Hashable

from shared.errors import ReadFailed
from streamd.readers.depth import DepthController
from streamd.readers.direct import OpenFile
from streamd.readers.engine import Engine
from streamd.readers.latency import LatencyHistogram
from streamd.readers.pieces import Piece, Slab, change_of, failure_of, split
from streamd.readers.read_queue import ReadQueue
from streamd.readers.slab_read import Completion, Priority, ReadStats, SlabRead

# Two of them, or four reads of 1.6 MB, are what is in flight at first (streamd/readers/depth.py).
PIECE_BYTES = 15 << 18
QUEUE_MAX_SLABS = 4096
CLOSE_PATIENCE_S = 5.0


class Reader:
    """Used by one thread, which waits for `fileno()` and then calls `poll()`; nothing here waits.

    Its files may stand on different disks: `align_bytes`, the largest of their alignments and of
    what is asked for, holds for all of them. The engine is closed with the reader, the files stay
    the caller's.
    """

    def __init__(
        self,
        engine: Engine,
        files: list[OpenFile],
        depth: int,
        *,
        align_bytes: int = 1,
        piece_bytes: int = PIECE_BYTES,
        queue_max_slabs: int = QUEUE_MAX_SLABS,
        controller: DepthController | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.align_bytes = max(align_bytes, *(file.align_bytes for file in files))
        assert 0 < depth <= engine.depth
        assert piece_bytes >= self.align_bytes
        self.depth = depth
        self._engine = engine
        self._files = files
        self._piece_bytes = piece_bytes // self.align_bytes * self.align_bytes
        self._queue_max_slabs = queue_max_slabs
        self._clock = clock
        self._slabs: dict[Hashable, Slab] = {}
        self._waiting = ReadQueue()
        self._controller = controller or DepthController()
        self._in_flight: dict[int, Piece] = {}
        self._next_token = 0
        self._latency = LatencyHistogram()
        self._reads = self._bytes_read = self._useful_bytes = 0
        self._retries = self._arrived_slabs = self._failed_slabs = 0
        self._in_flight_byte_s = 0.0
        self._idle_s, self._idle_from_s = 0.0, self._clock()
        self._is_idle = True

    def fileno(self) -> int:
        """Readable when `poll` has something to do."""
        return self._engine.fileno()

    @property
    def room(self) -> int:
        """How many more slabs `submit` takes before some complete."""
        return self._queue_max_slabs - len(self._slabs)

    @property
    def waiting_reads(self) -> int:
        """How many the engine has not been given yet."""
        return len(self._waiting)

    def register(self, buffer: memoryview) -> None:
        """Announces memory that will be read into again and again, so that it may be pinned."""
        self._engine.register(buffer)

    def forget(self, buffer: memoryview) -> None:
        """Lets memory go that was announced, and that nothing is read into."""
        self._engine.forget(buffer)

    def submit(self, request: SlabRead, priority: Priority = Priority.DEMAND) -> None:
        """Queues a slab; exactly one Completion with its key comes from a later `poll`."""
        assert self.room > 0
        assert request.key not in self._slabs
        slab = Slab(request.key, priority, self._clock(), request.owner)
        for extent in request.extents:
            file = self._files[extent.file_index]
            if file not in slab.files:
                slab.files.append(file)
            slab.useful_bytes += extent.length
            for piece in split(slab, extent, file, self.align_bytes, self._piece_bytes):
                slab.pieces_left += 1
                self._waiting.push(piece)
        assert slab.useful_bytes > 0
        self._slabs[request.key] = slab
        self._pump()

    def cancel(self, key: Hashable) -> bool:
        """Withdraws what the engine has not been given of a slab.

        True: nothing of it was in flight; it is forgotten and will not complete. False: it will
        complete, with an error if a part of it was withdrawn; until then its targets are in use.
        """
        slab = self._slabs[key]
        withdrawn_count = self._waiting.withdraw(slab)
        self._note_idle(self._clock())
        if slab.pieces_left == 0:
            del self._slabs[key]
            return True
        if withdrawn_count and slab.error is None:
            slab.error = ReadFailed("the read was cancelled")
        return False

    def withdraw(self, key: Hashable) -> bool:
        """`cancel` where that forgets the slab; a slab that is in flight is left to complete."""
        slab = self._slabs[key]
        return self._waiting.waiting_count(slab) == slab.pieces_left and self.cancel(key)

    def promote(self, key: Hashable, owner: int = 0) -> None:
        """Somebody waits now for a slab that was read ahead: what is left of it is demanded."""
        self._waiting.promote(self._slabs[key], owner)
        self._pump()

    def poll(self) -> list[Completion]:
        """Takes what has ended, hands the engine what waits; the slabs completed by that."""
        ended = self._engine.reap()
        if not ended:
            return []  # then there is no more room in flight than there was
        completions = []
        now_s = self._clock()
        for token, result in ended:
            piece = self._in_flight.pop(token)
            self._count(piece, result, now_s)
            slab = piece.slab
            if self._settle(piece, result):
                slab.pieces_left -= 1
            else:
                self._retries += 1
                self._waiting.push_front(piece)  # its slab has waited long enough
            if slab.pieces_left == 0:
                completions.append(self._complete(slab, now_s))
        self._pump()
        return completions

    @property
    def idle_s(self) -> float:
        """How long so far there was nothing to read that a client waits for or has hinted."""
        return self._idle_s + (self._clock() - self._idle_from_s if self._is_idle else 0.0)

    def stats(self) -> ReadStats:
        return ReadStats(
            engine=self._engine.name,
            reads=self._reads,
            bytes_read=self._bytes_read,
            useful_bytes=self._useful_bytes,
            retries=self._retries,
            slabs=self._arrived_slabs,
            failed_slabs=self._failed_slabs,
            in_flight_bytes=self._waiting.in_flight_bytes,
            in_flight_byte_s=self._in_flight_byte_s,
            in_flight_reads=len(self._in_flight),
            waiting_reads=len(self._waiting),
            limit_bytes=self._controller.limit_bytes,
            latency_ms_p50=self._latency.percentile_ms(50),
            latency_ms_p99=self._latency.percentile_ms(99),
        )

    def close(self, patience_s: float = CLOSE_PATIENCE_S) -> bool:
        """Drops what waits and lets what is in flight land, for at most `patience_s`.

        False: a disk did not answer in time; the targets may still be written to.
        """
        self._waiting = ReadQueue()
        deadline_s = time.monotonic() + patience_s
        bell = select.poll()
        bell.register(self.fileno(), select.POLLIN)
        while self._in_flight and (left_s := deadline_s - time.monotonic()) > 0:
            bell.poll(left_s * 1000)
            for token, _ in self._engine.reap():
                del self._in_flight[token]
        self._engine.close()
        return not self._in_flight

    def _pump(self) -> None:
        now_s = self._clock()
        limit_bytes = self._controller.limit_bytes
        while len(self._in_flight) < self.depth:
            piece = self._waiting.take(limit_bytes)
            if piece is None:
                break
            piece.started_s = now_s
            self._in_flight[self._next_token] = piece
            self._engine.submit(self._next_token, piece.file.fd, piece.target, piece.offset)
            self._next_token += 1
        self._engine.flush()
        self._note_idle(now_s)

    def _note_idle(self, now_s: float) -> None:
        is_idle = not self._waiting.serves_clients
        if is_idle and not self._is_idle:
            self._idle_from_s = now_s
        elif self._is_idle and not is_idle:
            self._idle_s += now_s - self._idle_from_s
        self._is_idle = is_idle

    def _count(self, piece: Piece, result: int, now_s: float) -> None:
        took_s = now_s - piece.started_s
        self._latency.add(took_s * 1000)
        self._in_flight_byte_s += piece.target.nbytes * took_s
        self._waiting.ended(piece)
        if self._waiting.demanded:
            self._controller.ended(piece.target.nbytes, now_s)
        else:
            self._controller.idle()
        self._reads += 1
        if result > 0:
            self._bytes_read += result
            piece.slab.bytes_read += result
            if not piece.file.direct:
                piece.file.forget(piece.offset, result)

    def _settle(self, piece: Piece, result: int) -> bool:
        """True: the piece has ended, well or with its slab's error. False: read what is left."""
        if result >= piece.needed:
            return True  # a widened read may end short at the end of the file
        piece.tries += 1
        piece.advance(max(result, 0) // self.align_bytes * self.align_bytes)
        error = failure_of(piece, result)
        if error is not None and piece.slab.error is None:
            piece.slab.error = error
        if piece.slab.error is None:
            return False
        self._waiting.withdraw(piece.slab)
        return True

    def _complete(self, slab: Slab, now_s: float) -> Completion:
        del self._slabs[slab.key]
        if slab.error is None:
            # After the last byte has come: what was written before that shows now.
            slab.error = next(filter(None, map(change_of, slab.files)), None)
        if slab.error is None:
            self._arrived_slabs += 1
            self._useful_bytes += slab.useful_bytes
        else:
            self._failed_slabs += 1
        latency_ms = (now_s - slab.submitted_s) * 1000
        return Completion(slab.key, slab.error, slab.bytes_read, latency_ms)
