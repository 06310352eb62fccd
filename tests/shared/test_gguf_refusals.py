"""Broken and hostile files: each is refused by name, quickly and in little memory."""

import os
import struct
import time
import tracemalloc

import gguf
import numpy as np
import pytest

from shared import gguf_header, gguf_values
from shared.errors import MalformedModel, ModelChanged, ModelError, ReadFailed, UnsupportedModel
from shared.gguf_index import GgufIndex

HUGE = (1 << 64) - 1


def refusal(path, kind):
    with pytest.raises(kind) as caught:
        GgufIndex.open(path)
    assert type(caught.value) is kind
    assert caught.value.remedy
    return caught.value.message


@pytest.fixture
def refused(tmp_path):
    """Writes bytes to a file; the message of its refusal."""

    def write_and_open(content, kind=MalformedModel):
        path = tmp_path / "m.gguf"
        path.write_bytes(content)
        message = refusal(path, kind)
        assert str(path) in message
        return message

    return write_and_open


def test_what_is_no_file(tmp_path):
    assert "No such file" in refusal(tmp_path / "absent.gguf", ModelError)
    assert "is a directory" in refusal(tmp_path, ModelError)
    assert "null byte" in refusal("a\0b.gguf", ModelError)
    assert "not a regular file" in refusal("/dev/null", ModelError)
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in refusal(tmp_path / "pipe.gguf", ModelError)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04" + bytes(100)])
def test_what_is_no_gguf(refused, content):
    assert "is not a GGUF file" in refused(content)


@pytest.mark.parametrize("version", [0x10000 + 3, 0, 1, 4])
def test_unknown_version(refused, gguf_bytes, version):
    message = refused(gguf_bytes.raw_gguf(version=version), UnsupportedModel)
    expected = "is big-endian" if version == 0 else f"version {version}"
    assert expected in message


def test_big_endian(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "test", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("t", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "is big-endian" in refusal(path, UnsupportedModel)


def test_every_truncation_is_noticed(tmp_path, gguf_factory):
    model = gguf_factory.hy3_model(n_layers=1, tokenizer=False)
    model.tensors = dict(list(model.tensors.items())[1:2])
    path = model.write(tmp_path / "m.gguf")
    index = GgufIndex.open(path)
    end = max(tensor.offset + tensor.byte_count for tensor in index.tensors.values())
    header_end = min(tensor.offset for tensor in index.tensors.values())
    content = path.read_bytes()
    for length in [*range(header_end), end - 1]:
        path.write_bytes(content[:length])
        message = refusal(path, MalformedModel)
        assert (
            "truncated" in message
            or "ends inside" in message
            or "claims" in message
            or (length < 4 and "not a GGUF" in message)
        )
    path.write_bytes(content[:end])
    assert GgufIndex.open(path).tensors == index.tensors


def test_data_that_is_cut_off_says_how_much(tmp_path, gguf_factory):
    path = gguf_factory.hy3_model(n_layers=1).write(tmp_path / "m.gguf")
    os.truncate(path, path.stat().st_size // 2)
    message = refusal(path, MalformedModel)
    assert f"the file at {path.stat().st_size:,}" in message


@pytest.mark.parametrize("alignment", [0, 3, 48, 1 << 21, 1 << 31])
def test_absurd_alignment(tmp_path, gguf_factory, gguf_bytes, alignment):
    path = gguf_factory.hy3_model(n_layers=1).write(tmp_path / "m.gguf")
    gguf_bytes.patch_scalar(path, "general.alignment", alignment)
    assert f"general.alignment {alignment} is" in refusal(path, MalformedModel)


def test_unknown_tensor_type(tmp_path, gguf_factory, gguf_bytes):
    path = gguf_factory.hy3_model(n_layers=1).write(tmp_path / "m.gguf")
    gguf_bytes.patch_tensor(path, "output.weight", type_id=99)
    message = refusal(path, UnsupportedModel)
    assert "'output.weight': tensor type 99 is unknown" in message


@pytest.mark.parametrize(
    ("offset", "reason"),
    [
        (1, "not aligned to 32"),
        (0, "overlap"),
        (1 << 40, "truncated"),
        (HUGE - 31, "truncated"),  # -32
    ],
)
def test_offset_that_cannot_be(tmp_path, gguf_factory, gguf_bytes, offset, reason):
    path = gguf_factory.hy3_model(n_layers=1).write(tmp_path / "m.gguf")
    gguf_bytes.patch_tensor(path, "output.weight", offset=offset)
    message = refusal(path, MalformedModel)
    assert reason in message
    assert "'output.weight'" in message


@pytest.mark.parametrize(
    ("shape", "type_id", "reason"),
    [
        ((), 0, "has 0 dimensions"),
        ((1, 1, 1, 1, 1), 0, "has 5 dimensions"),
        ((8, 0), 0, "is empty"),
        ((33,), 8, "row of 33 weights is not a multiple"),
        ((HUGE, HUGE, HUGE, HUGE), 0, "truncated"),
    ],
)
def test_shape_that_cannot_be(refused, gguf_bytes, shape, type_id, reason):
    tensor = gguf_bytes.tensor("odd\n", shape, type_id)
    message = refused(gguf_bytes.raw_gguf(tensors=(tensor,), data=bytes(64)))
    assert reason in message
    assert r"'odd\n'" in message


def test_what_is_there_twice(refused, gguf_bytes):
    tensors = (gguf_bytes.tensor("t"), gguf_bytes.tensor("t", offset=32))
    message = refused(gguf_bytes.raw_gguf(tensors=tensors, data=bytes(64)))
    assert "has the tensor 't' twice" in message
    key = gguf_bytes.key("k", gguf_bytes.U8, b"\1")
    assert "has the key 'k' twice" in refused(gguf_bytes.raw_gguf((key, key)))


def test_names_that_are_no_text(refused, gguf_bytes):
    key = gguf_bytes.key(b"\xff\x1b[2J" + b"x" * 1000, gguf_bytes.U8, b"\1")
    message = refused(gguf_bytes.raw_gguf((key,)))
    assert "is not UTF-8" in message
    assert message.isprintable()
    assert len(message) < 400


def test_value_types_we_do_not_know(refused, gguf_bytes):
    key = gguf_bytes.key("k", 13, b"\1")
    assert "'k' has the unknown value type 13" in refused(
        gguf_bytes.raw_gguf((key,)), UnsupportedModel
    )
    key = gguf_bytes.array_key("k", 255, 1, b"\1")
    assert "value type 255" in refused(gguf_bytes.raw_gguf((key,)), UnsupportedModel)
    nested = struct.pack("<IQB", gguf_bytes.U8, 1, 7)
    key = gguf_bytes.array_key("k", gguf_bytes.ARRAY, 1, nested)
    assert "array of arrays" in refused(gguf_bytes.raw_gguf((key,)), UnsupportedModel)


def test_architecture_missing_or_no_text(refused, gguf_bytes):
    message = refused(struct.pack("<4sIQQ", b"GGUF", 3, 0, 0))
    assert "lacks the key 'general.architecture'" in message
    key = gguf_bytes.key("general.architecture", gguf_bytes.U8, b"\1")
    content = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + key
    assert "'general.architecture' is not a text" in refused(content)


def test_disk_error_is_told(tmp_path, gguf_factory, monkeypatch):
    path = gguf_factory.hy3_model(n_layers=1).write(tmp_path / "m.gguf")

    def failing_pread(fd, count, offset):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(gguf_header.os, "pread", failing_pread)
    assert "Input/output error" in refusal(path, ReadFailed)


def test_file_that_shrinks_while_it_is_read(tmp_path, gguf_factory, monkeypatch):
    path = gguf_factory.hy3_model(n_layers=1).write(tmp_path / "m.gguf")
    monkeypatch.setattr(gguf_header.os, "pread", lambda fd, count, offset: b"")
    assert "shrank" in refusal(path, ModelChanged)


def lies(gguf_bytes) -> dict[str, bytes]:
    """Small files that claim to be enormous."""
    string = struct.pack("<Q", HUGE) + b"x"
    return {
        "claims 18,446,744,073,709,551,615 metadata keys": gguf_bytes.raw_gguf(key_count=HUGE),
        "claims 100,000 metadata keys": gguf_bytes.raw_gguf(key_count=100_000, data=bytes(1 << 21)),
        "claims 18,446,744,073,709,551,615 tensors": gguf_bytes.raw_gguf(tensor_count=HUGE),
        "claims 200,000 tensors": gguf_bytes.raw_gguf(tensor_count=200_000, data=bytes(1 << 23)),
        "ends inside its header": gguf_bytes.raw_gguf(
            (gguf_bytes.key("k", gguf_bytes.STRING, string),)
        ),
        "the file ends inside": gguf_bytes.raw_gguf(
            (gguf_bytes.array_key("k", gguf_bytes.U64, HUGE, b""),)
        ),
        "more than 2,097,152 strings": gguf_bytes.raw_gguf(
            (gguf_bytes.array_key("k", gguf_bytes.STRING, HUGE, b""),)
        ),
        "ends inside": gguf_bytes.raw_gguf(
            (gguf_bytes.array_key("k", gguf_bytes.STRING, 1 << 20, b""),)
        ),
    }


def test_lies_cost_neither_time_nor_memory(refused, gguf_bytes):
    for reason, content in lies(gguf_bytes).items():
        tracemalloc.start()
        began = time.monotonic()
        message = refused(content)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert reason in message
        assert time.monotonic() - began < 1
        assert peak_bytes < 2 * len(content) + (8 << 20)


def test_header_is_bounded_even_where_the_file_is_long_enough(tmp_path, gguf_bytes):
    long = gguf_bytes.key("k", gguf_bytes.STRING, struct.pack("<Q", 1 << 30))
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes.raw_gguf((long,)))
    os.truncate(path, 1 << 31)  # sparse
    tracemalloc.start()
    assert "header is larger than 128 MiB" in refusal(path, MalformedModel)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 8 << 20


def test_strings_of_all_arrays_share_one_bound(refused, gguf_bytes, monkeypatch):
    monkeypatch.setattr(gguf_header, "MAX_ARRAY_STRINGS", 5)
    three = gguf_bytes.string("a") * 3
    keys = [gguf_bytes.array_key(name, gguf_bytes.STRING, 3, three) for name in ("k", "l")]
    assert "more than 5 strings" in refused(gguf_bytes.raw_gguf(tuple(keys)))


def test_key_count_is_bounded(refused, gguf_bytes, monkeypatch):
    monkeypatch.setattr(gguf_values, "MAX_KEYS", 2)
    keys = [gguf_bytes.key(name, gguf_bytes.U8, b"\1") for name in "ab"]
    assert "claims 3 metadata keys" in refused(gguf_bytes.raw_gguf(tuple(keys)))
