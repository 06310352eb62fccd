"""Resident tensors on their way from the disk to a GPU that is plain memory."""

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from fake_gpu import FakeDevice

from shared.arena import round_up
from shared.errors import GpuError, ModelChanged
from shared.gguf_shard import TensorInfo
from shared.quants import TensorType
from shared.resident import gpu_resident_layout
from shared.sizes import size_text
from streamd.readers.direct import open_file
from streamd.readers.probe import FALLBACK, make_engine
from streamd.readers.reader import Reader
from streamd.tiers import resident
from streamd.tiers.resident_uploads import RING_COUNT, ResidentUpload, pieces_of

PIECE_BYTES = 16 << 10
# (offset in the file, bytes): more pieces than buffers, odd ends, neighbours, an empty one.
TENSORS = [(96, 3), (4096, PIECE_BYTES), (20_480, 200_001), (220_481, 0), (220_500, 70_000)]
FILE_BYTES = 300_000


@pytest.fixture
def content():
    return np.random.default_rng(3).bytes(FILE_BYTES)


@dataclass
class Place:
    path: Path
    reader: Reader
    device: FakeDevice
    stack: ExitStack

    def upload(self, layout, memory, stopped=lambda: False):
        ResidentUpload(self.device, self.reader, self.stack, PIECE_BYTES).run(
            layout, memory.address, stopped
        )


@pytest.fixture
def place(content, tmp_path):
    path = tmp_path / "tensors"
    path.write_bytes(content)
    with ExitStack() as stack:
        file = open_file(path)
        stack.callback(file.close)
        reader = Reader(make_engine(FALLBACK, 4), [file], 4, align_bytes=4096)
        stack.callback(reader.close)
        yield Place(path, reader, FakeDevice(at_once=True), stack)


@pytest.fixture
def layout():
    tensors = [
        TensorInfo(f"t{n}", TensorType.I8, (size,), 0, offset, size)
        for n, (offset, size) in enumerate(TENSORS)
    ]
    return gpu_resident_layout(tensors)


@pytest.fixture
def memory(layout, place):
    memory = place.device.allocate(layout.total_bytes)
    place.stack.callback(memory.close)
    return memory


def _bytes_of(memory, placed):
    at = placed.payload_offset
    return bytes(memory._memory[at : at + placed.tensor.byte_count])


def test_every_byte_arrives(place, layout, memory, content):
    place.upload(layout, memory)
    assert len(layout.tensors) == len(TENSORS)
    for placed in layout.tensors:
        offset = placed.tensor.offset
        assert _bytes_of(memory, placed) == content[offset : offset + placed.tensor.byte_count]
    assert not place.device.copying


def test_it_takes_a_few_buffers_however_large_the_tensors(place, layout, memory):
    place.upload(layout, memory)
    (size_bytes,) = place.device.pinned.values()
    assert size_bytes == RING_COUNT * (round_up(PIECE_BYTES, 4096) + 4096)
    assert size_bytes < sum(size for _, size in TENSORS)
    place.stack.close()
    assert not place.device.pinned


def test_memory_that_cannot_be_pinned_will_do(place, layout, memory, content):
    place.device.refuses_pins = True
    place.upload(layout, memory)
    last = layout.tensors[-1]
    assert _bytes_of(memory, last) == content[last.tensor.offset :][: last.tensor.byte_count]


def test_pieces_cover_each_tensor_once(layout):
    pieces = list(pieces_of(layout, 1 << 20, PIECE_BYTES))
    assert sum(piece.length for piece in pieces) == sum(size for _, size in TENSORS)
    assert max(piece.length for piece in pieces) == PIECE_BYTES
    spans = sorted((piece.target, piece.target + piece.length) for piece in pieces)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_it_says_how_far_it_is(place, layout, memory, monkeypatch, caplog):
    monkeypatch.setattr(resident, "PROGRESS_INTERVAL_S", -1.0)
    with caplog.at_level(logging.INFO):
        place.upload(layout, memory)
    told = [message for message in caplog.messages if "resident tensors" in message]
    assert len(told) == len(list(pieces_of(layout, 0, PIECE_BYTES)))
    total = sum(size for _, size in TENSORS)
    whole = size_text(layout.held_bytes)
    assert told[-1] == f"resident tensors: {size_text(total)} of {whole}"


def test_a_file_that_has_been_cut_off_is_told(place, layout, memory):
    os.truncate(place.path, 100_000)
    with pytest.raises(ModelChanged):
        place.upload(layout, memory)


def test_copies_that_are_refused_are_told(place, layout, memory):
    place.device.refuses_copies = True
    with pytest.raises(GpuError):
        place.upload(layout, memory)


def test_it_stops_when_it_is_told_to(place, layout, memory):
    asked = iter([False, False, True])
    place.upload(layout, memory, lambda: next(asked))
    assert next(asked, None) is None
