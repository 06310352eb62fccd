"""`streamd scrub`: read a whole model once, as a neighbour nobody notices, and report.

Finds what the drive cannot read any more before a chat does, and sums each file (XXH3, 64 bit), so
that two copies can be compared.
"""

import ctypes
import os
import select
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from shared.arena import stretch_bytes
from shared.errors import ModelChanged, StreamError
from shared.gguf_index import GgufIndex
from streamd.readers.depth import DepthController
from streamd.readers.direct import OpenFile, open_file
from streamd.readers.engine import Engine
from streamd.readers.probe import AUTO, choose_engine
from streamd.readers.reader import PIECE_BYTES, Reader
from streamd.readers.slab_read import Completion, Extent, Priority, SlabRead
from streamd.tiers.regions import private_memory

AHEAD_COUNT = 16
# Backfill takes a share of it.
IN_FLIGHT_COUNT = 8
WAIT_MS = 1000
# A dead drive would fill pages with them; they are counted all the same.
MAX_ERRORS_SHOWN = 20

# linux/ioprio.h: who is a process (0: this one), and the class that reads when nobody else does
_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_IDLE = 3 << 13


@dataclass
class FileReport:
    path: Path
    size_bytes: int
    xxh3: str = ""  # of the whole file; empty if a part of it could not be read
    error_count: int = 0
    errors: list[str] = field(default_factory=list)  # the first few, by byte range

    def add_error(self, start: int, end: int, error: StreamError) -> None:
        self.error_count += 1
        if len(self.errors) < MAX_ERRORS_SHOWN:
            self.errors.append(f"bytes {start} to {end}: {error}")


def scrub(
    model: Path,
    progress: Callable[[int, int], None],
    choose: Callable[[str, int], tuple[Engine, list[str]]] = choose_engine,
) -> Iterator[FileReport]:
    """Each shard's report in turn; `progress(read_bytes, all_bytes)` is called as it goes.

    Raises ModelChanged when a file is written to meanwhile: the rest would tell nothing.
    """
    _be_idle()
    index = GgufIndex.open(model)
    with ExitStack() as stack:
        files = []
        for path in index.paths:
            files.append(open_file(path))
            stack.callback(files[-1].close)
        engine, _ = choose(AUTO, AHEAD_COUNT)
        limit = DepthController.fixed(IN_FLIGHT_COUNT * PIECE_BYTES)
        reader = Reader(engine, files, AHEAD_COUNT, controller=limit)
        stack.callback(reader.close)
        capacity = stretch_bytes(PIECE_BYTES, reader.align_bytes)
        memory = memoryview(private_memory(AHEAD_COUNT * capacity))
        targets = [memory[n * capacity : (n + 1) * capacity] for n in range(AHEAD_COUNT)]
        all_bytes = sum(file.size_bytes for file in files)
        before_bytes = 0
        for file_index, file in enumerate(files):

            def tell(read_bytes: int, before_bytes: int = before_bytes) -> None:
                progress(before_bytes + read_bytes, all_bytes)

            yield _read_file(reader, file_index, file, targets, tell)
            before_bytes += file.size_bytes


def _read_file(
    reader: Reader,
    file_index: int,
    file: OpenFile,
    targets: list[memoryview],
    tell: Callable[[int], None],
) -> FileReport:
    """Pieces are read ahead into the targets in turn, and summed in order."""
    report = FileReport(file.path, file.size_bytes)
    digest = xxhash.xxh3_64()
    count = -(-file.size_bytes // PIECE_BYTES)
    landed: dict[int, Completion] = {}
    submitted = 0
    bell = select.poll()
    bell.register(reader.fileno(), select.POLLIN)
    for number in range(count):
        while submitted < min(number + len(targets), count):
            reader.submit(_piece(file_index, file, submitted, targets), Priority.BACKFILL)
            submitted += 1
        while number not in landed:
            bell.poll(WAIT_MS)
            for completion in reader.poll():
                assert isinstance(completion.key, int)
                landed[completion.key] = completion
        error = landed.pop(number).error
        start = number * PIECE_BYTES
        end = min(start + PIECE_BYTES, file.size_bytes)
        if isinstance(error, ModelChanged):
            raise error
        if error is None:
            digest.update(targets[number % len(targets)][: end - start])
        else:
            report.add_error(start, end, error)
        tell(end)
    if not report.error_count:
        report.xxh3 = digest.hexdigest()
    return report


def _piece(file_index: int, file: OpenFile, number: int, targets: list[memoryview]) -> SlabRead:
    offset = number * PIECE_BYTES
    length = min(PIECE_BYTES, file.size_bytes - offset)
    extent = Extent(file_index, offset, length, targets[number % len(targets)])
    return SlabRead(number, (extent,))


def _be_idle() -> None:
    """Leave the drive to everybody else, where the I/O scheduler knows classes."""
    number = _SYS_IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE)
