"""Resident tensors from the disk to GPU memory, of which the host keeps no copy.

    disk --> one of RING_COUNT pinned buffers --> GPU memory, and the buffer is free again

A tensor goes in pieces of PIECE_BYTES, each read and copied by itself, in any order.
"""

import select
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

from shared import shm
from shared.arena import stretch_bytes
from shared.device_copies import Copy
from shared.resident import ResidentLayout
from streamd.gpu.device import GpuDevice
from streamd.readers.reader import Reader
from streamd.readers.slab_read import Extent, SlabRead
from streamd.tiers.regions import private_memory
from streamd.tiers.resident import Progress

PIECE_BYTES = 8 << 20
RING_COUNT = 8
WAIT_MS = 200
# While copies are under way, which tell no descriptor of their end.
COPYING_WAIT_MS = 1


class Piece(NamedTuple):
    """Of a tensor; target: its address in GPU memory."""

    file_index: int
    offset: int
    length: int
    target: int


def pieces_of(layout: ResidentLayout, base_address: int, piece_bytes: int) -> Iterator[Piece]:
    """Of all tensors of a layout that begins at `base_address`."""
    for placed in layout.tensors:
        tensor = placed.tensor
        for done in range(0, tensor.byte_count, piece_bytes):
            length = min(piece_bytes, tensor.byte_count - done)
            target = base_address + placed.payload_offset + done
            yield Piece(tensor.file_index, tensor.offset + done, length, target)


class ResidentUpload:
    """Buffers that belong to `stack`, in whose end nothing is copied from them any more."""

    def __init__(
        self, device: GpuDevice, reader: Reader, stack: ExitStack, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._device, self._reader = device, reader
        self._piece_bytes = piece_bytes
        size_bytes = stretch_bytes(piece_bytes, reader.align_bytes)
        memory = private_memory(RING_COUNT * size_bytes)
        self._address = shm.address(memory)
        whole = memoryview(memory)
        self._buffers = [whole[n * size_bytes : (n + 1) * size_bytes] for n in range(RING_COUNT)]
        self._buffer_bytes = size_bytes
        self._free = deque(range(RING_COUNT))
        self._reading: dict[Hashable, tuple[int, Piece]] = {}  # by the read's key: buffer, piece
        self._copying_count = 0
        if device.pin(self._address, len(memory)):
            stack.callback(device.unpin, self._address)
        stack.callback(device.drain)

    def run(self, layout: ResidentLayout, base_address: int, stopped: Callable[[], bool]) -> None:
        """Every tensor of `layout`. Raises what reading or copying raise; early if `stopped()`."""
        pieces = pieces_of(layout, base_address, self._piece_bytes)
        progress = Progress(layout.held_bytes)
        bell = select.poll()
        bell.register(self._reader.fileno(), select.POLLIN)
        while not stopped():
            self._read_more(pieces)
            if not (self._reading or self._copying_count):
                return
            bell.poll(COPYING_WAIT_MS if self._copying_count else WAIT_MS)
            for completion in self._reader.poll():
                if completion.error is not None:
                    raise completion.error
                buffer, piece = self._reading.pop(completion.key)
                progress.add(piece.length)
                self._copy(buffer, piece)
            for buffer, error in self._device.reap():
                if error is not None:
                    raise error
                self._copying_count -= 1
                self._free.append(buffer)

    def _read_more(self, pieces: Iterator[Piece]) -> None:
        while self._free and self._reader.room:
            piece = next(pieces, None)
            if piece is None:
                return
            buffer = self._free.popleft()
            key = ("upload", buffer)
            self._reading[key] = buffer, piece
            extent = Extent(piece.file_index, piece.offset, piece.length, self._buffers[buffer])
            self._reader.submit(SlabRead(key, (extent,)))

    def _copy(self, buffer: int, piece: Piece) -> None:
        """The payload begins as far into the buffer as the piece is off the alignment."""
        delta = piece.offset % self._reader.align_bytes
        source = self._address + buffer * self._buffer_bytes + delta
        self._device.submit(buffer, [Copy(piece.target, source, piece.length)])
        self._copying_count += 1


def upload_from_disk(
    layout: ResidentLayout,
    base_address: int,
    device: GpuDevice,
    reader: Reader,
    stopped: Callable[[], bool],
) -> None:
    """Read the tensors of `layout` into GPU memory at `base_address`; see ResidentUpload.run."""
    with ExitStack() as stack:
        ResidentUpload(device, reader, stack).run(layout, base_address, stopped)
