"""What clients' routers choose, on record: `streamd --trace FILE`.

    line     JSON: format "streamd-trace", version, model, n_layers, n_experts, top_k, and
             layer_bytes, the bytes of an expert's slab in each layer
    then     u16, little-endian, one record after the other:
             client | layer | use count | count | experts [count]
             client | 0xFFFF | 0 | 2 | lost u32             so many records of it are missing here

A record is a section: a decode step's top-k (use count = count <= top_k), or a wave of a prefill
(a use count larger than 65535 is given as that). Records of one client are in order. They come
through a ring in the client's area (shared/residency.py) and are written by a thread, so that
neither the clients nor the main loop wait for the disk; what does not fit is counted as lost.

A daemon that starts, or opens its model anew, begins a file of its own: the one that is there, and
may be of another model, is kept as FILE.1, the next one as FILE.2 and so on.
"""

import json
import logging
import stat
import threading
from collections.abc import Iterable
from pathlib import Path
from queue import Empty, Full, Queue

import numpy as np
import numpy.typing as npt

from shared.errors import ConfigError
from shared.experts import ExpertIndex
from shared.residency import ClientArea
from shared.threads import start_thread
from streamd.scheduling.scheduler import layer_slab_bytes

log = logging.getLogger(__name__)

VERSION = 1
LOST = 0xFFFF
MAX_LOST = 2**32 - 1
CHUNK_BYTES = 1 << 16
MAX_WAITING_CHUNKS = 64
MAX_KEPT = 1000


class TraceWriter:
    """Writes chunks of bytes to a file in a thread of its own; never waits for it."""

    def __init__(self, path: Path, first: bytes) -> None:
        try:
            keep_older(path)
            self._file = path.open("wb")
            self._file.write(first)
        except OSError as error:
            raise ConfigError(
                f"cannot write the trace {path}: {error.strerror}", "give --trace another file"
            ) from error
        self._path = path
        self._chunks: Queue[bytes] = Queue(MAX_WAITING_CHUNKS)
        self._closing = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._work, name="trace", daemon=True)
        start_thread(self._thread)

    def put(self, chunk: bytes) -> bool:
        """Whether it will be written, as far as can be known."""
        try:
            self._chunks.put_nowait(chunk)
        except Full:
            return False
        return not self._failed

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _work(self) -> None:
        while not (self._closing.is_set() and self._chunks.empty()):
            try:
                self._write(self._chunks.get(timeout=0.2))
            except Empty:
                continue
        try:
            self._file.close()  # which tries once more to write what is left
        except OSError as error:
            self._fail(error)

    def _write(self, chunk: bytes) -> None:
        if self._failed:
            return
        try:
            self._file.write(chunk)
            self._file.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            log.error("the trace %s ends here: %s", self._path, error.strerror)


def keep_older(path: Path) -> None:
    """Give what was recorded there before another name, the first of FILE.1, FILE.2, ... that is
    free. OSError if that cannot be; ConfigError where there are so many."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    if not (stat.S_ISREG(status.st_mode) and status.st_size):
        return
    names = (path.with_name(f"{path.name}.{number}") for number in range(1, MAX_KEPT + 1))
    kept = next((name for name in names if not name.exists()), None)
    if kept is None:
        raise ConfigError(
            f"there are {MAX_KEPT} older traces beside {path}", "remove some, or give another file"
        )
    path.rename(kept)
    log.info("the trace %s that was there is %s now", path, kept.name)


class Tracer:
    """Empties the clients' rings. lost_count: records that are missing in the file."""

    def __init__(self, path: Path, model: Path, experts: ExpertIndex) -> None:
        header = {
            "format": "streamd-trace",
            "version": VERSION,
            "model": model.name,
            "n_layers": experts.n_layers,
            "n_experts": experts.n_experts,
            "top_k": experts.top_k,
            "layer_bytes": layer_slab_bytes(experts),
        }
        self._n_layers, self._n_experts = experts.n_layers, experts.n_experts
        self._writer = TraceWriter(path, json.dumps(header).encode() + b"\n")
        self._path = path
        self._taken: dict[int, tuple[int, int]] = {}  # client -> cells, records
        self._chunk: list[npt.NDArray[np.uint16]] = []
        self._chunk_bytes = self._chunk_records = 0
        self.record_count = 0
        self.lost_count = 0

    def values(self) -> dict[str, str | int]:
        return {"file": str(self._path), "records": self.record_count, "lost": self.lost_count}

    def take(self, clients: Iterable[tuple[int, ClientArea]]) -> None:
        """What clients have recorded since the last time. (number, area) of each."""
        for number, area in clients:
            cells, records = area.recorded
            taken_cells, taken_records = self._taken.get(number, (0, 0))
            if cells == taken_cells:
                continue
            found = area.recorded_cells(taken_cells, cells)
            parsed = None if found is None else self._parse(number, found)
            if parsed is None:
                # Overrun, or what is there is no record: it is the client's memory.
                lost_count = min(max(0, records - taken_records), MAX_LOST)
                self._lose(lost_count)
                halves = (lost_count & 0xFFFF, lost_count >> 16)
                parsed = [np.array([number, LOST, 0, 2, *halves], np.uint16)]
                self._taken[number] = (cells, records)
            else:
                self._taken[number] = (cells, taken_records + len(parsed))
            for record in parsed:
                self._append(record)

    def forget(self, number: int, area: ClientArea) -> None:
        """A client has gone: what it has recorded to the end."""
        self.take([(number, area)])
        self._taken.pop(number, None)

    def close(self) -> None:
        self._flush()
        self._writer.close()
        log.info("trace %s: %d records, %d lost", self._path, self.record_count, self.lost_count)

    def _parse(
        self, number: int, cells: npt.NDArray[np.uint16]
    ) -> list[npt.NDArray[np.uint16]] | None:
        """The records in a stretch of the ring, as the file has them; None for anything else."""
        records = []
        at = 0
        while at < len(cells):
            head = cells[at : at + 3].tolist()
            if len(head) < 3 or head[0] >= self._n_layers:
                return None
            end = at + 3 + head[2]
            experts = cells[at + 3 : end]
            if len(experts) < head[2] or bool(np.any(experts >= self._n_experts)):
                return None
            records.append(np.concatenate([np.array([number], np.uint16), cells[at:end]]))
            at = end
        return records

    def _append(self, record: npt.NDArray[np.uint16]) -> None:
        self._chunk.append(record)
        self._chunk_bytes += record.nbytes
        self._chunk_records += record[1] != LOST
        if self._chunk_bytes >= CHUNK_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._chunk:
            return
        if self._writer.put(np.concatenate(self._chunk).astype("<u2").tobytes()):
            self.record_count += int(self._chunk_records)
        else:
            self._lose(int(self._chunk_records))
        self._chunk.clear()
        self._chunk_bytes = self._chunk_records = 0

    def _lose(self, count: int) -> None:
        if not self.lost_count:
            log.warning("the trace %s is not complete: see `trace` in the statistics", self._path)
        self.lost_count += count
