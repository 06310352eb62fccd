"""Mutants of sound files: whatever is flipped or cut off, only our own exceptions come out."""

import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import StreamError
from shared.experts import ExpertIndex, resident_tensors
from shared.gguf_index import GgufIndex


@pytest.fixture(scope="module")
def fuzz_bases(gguf_factory, gguf_bytes, tmp_path_factory) -> tuple[list[bytes], Path]:
    """Two small sound files and the path for their mutants: a model, and one of each value type."""
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    model = gguf_factory.hy3_model(
        n_layers=2,
        width=32,
        expert_width=32,
        dense_width=32,
        heads=1,
        kv_heads=1,
        head_dim=32,
        n_experts=2,
        mtp=True,
        expert_types=[gguf.GGMLQuantizationType.Q8_0] * 3,
        tokenizer=False,
        vocab_count=8,
    )
    strings = b"".join(gguf_bytes.string(text) for text in ("one", "", "t" * 300, "four"))
    keys = (
        *(gguf_bytes.key(f"s{kind}", kind, b"\1" * 8) for kind in (10, 11, 12)),
        *(gguf_bytes.array_key(f"a{kind}", kind, 3, b"\1" * 3) for kind in (0, 1, 7)),
        gguf_bytes.array_key("strings", gguf_bytes.STRING, 4, strings),
        gguf_bytes.key("split.count", gguf_bytes.U32, struct.pack("<I", 1)),
        gguf_bytes.key("general.alignment", gguf_bytes.U32, struct.pack("<I", 32)),
    )
    tensors = tuple(gguf_bytes.tensor(f"t{at}", offset=32 * at) for at in range(3))
    raw = gguf_bytes.raw_gguf(keys, tensors, bytes(96))
    return [model.write(path).read_bytes(), raw], path


@settings(max_examples=400)
@given(data=st.data())
def test_no_mutant_escapes_as_another_exception(fuzz_bases, data):
    bases, path = fuzz_bases
    content = bytearray(data.draw(st.sampled_from(bases)))
    positions = st.integers(0, min(len(content), 6000) - 1)
    for at, byte in data.draw(
        st.lists(st.tuples(positions, st.integers(0, 255)), min_size=1, max_size=4)
    ):
        content[at] = byte
    kept = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    path.write_bytes(content[:kept])
    began = time.monotonic()
    try:
        index = GgufIndex.open(path)
        for value in index.metadata.values():
            assert isinstance(value, bool | int | float | str | list | np.ndarray)
        for tensor in index.tensors.values():
            assert 0 < tensor.offset <= tensor.offset + tensor.byte_count <= kept
        resident = resident_tensors(index)
        experts = ExpertIndex.from_gguf(index)
        assert experts.part_offsets.max() < kept
        assert len(resident) < len(index.tensors)
        text = ""
    except StreamError as error:
        text = str(error)
    assert text.isprintable()
    assert time.monotonic() - began < 2


EXTREMES = [
    *(0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40),
    *(2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1),
]
MOST_BYTES = 64 << 20


@settings(max_examples=300)
@given(data=st.data())
def test_extreme_numbers_cost_neither_time_nor_memory(fuzz_bases, data):
    """Lengths, counts, offsets and types are what they should not be: in any place, and several."""
    bases, path = fuzz_bases
    content = bytearray(data.draw(st.sampled_from(bases)))
    positions = st.integers(4, min(len(content), 6000) - 8)
    numbers = st.tuples(positions, st.sampled_from(EXTREMES), st.sampled_from(["<Q", "<I"]))
    for at, number, form in data.draw(st.lists(numbers, min_size=1, max_size=3)):
        struct.pack_into(form, content, at, number & (2 ** (8 * struct.calcsize(form)) - 1))
    path.write_bytes(content)
    began, message = time.monotonic(), "none"
    tracemalloc.start()
    try:
        index = GgufIndex.open(path)
        resident_tensors(index)
        ExpertIndex.from_gguf(index)
    except StreamError as error:
        message = str(error)
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert message.isprintable()
    assert peak_bytes < MOST_BYTES
    assert time.monotonic() - began < 4


@pytest.fixture(scope="module")
def shards(gguf_factory, tmp_path_factory) -> dict[Path, bytes]:
    directory = tmp_path_factory.mktemp("shards")
    model = gguf_factory.hy3_model(n_layers=2, tokenizer=False)
    model.write(directory / "m.gguf", shard_tensors=20)
    paths = sorted(directory.glob("m-*.gguf"))
    assert len(paths) > 1
    return {path: path.read_bytes() for path in paths}


@settings(max_examples=150)
@given(data=st.data())
def test_a_mutant_among_shards(shards, data):
    for path, content in shards.items():
        path.write_bytes(content)
    mutant = data.draw(st.sampled_from(sorted(shards)))
    content = bytearray(shards[mutant])
    positions = st.integers(0, min(len(content), 3000) - 1)
    for at, byte in data.draw(
        st.lists(st.tuples(positions, st.integers(0, 255)), min_size=1, max_size=4)
    ):
        content[at] = byte
    mutant.write_bytes(content)
    for path in shards:
        message = "none"
        try:
            index = GgufIndex.open(path)
            assert len(index.paths) in (1, len(shards))
        except StreamError as error:
            message = str(error)
        assert message.isprintable()
