"""Sound files, compared with what the gguf package reads from them."""

import os
import struct

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import gguf_header
from shared.errors import MalformedModel, ModelChanged
from shared.gguf_header import HeaderReader
from shared.gguf_index import GgufIndex


def assert_same_as_reader(index, path):
    reader = gguf.GGUFReader(path)
    assert index.alignment == reader.alignment
    found = {
        name: (t.shape, t.type_id, t.offset, t.byte_count) for name, t in index.tensors.items()
    }
    assert found == {
        t.name: (tuple(t.shape.tolist()), int(t.tensor_type), t.data_offset, t.n_bytes)
        for t in reader.tensors
    }
    fields = {name: f for name, f in reader.fields.items() if not name.startswith("GGUF.")}
    assert list(index.metadata) == list(fields)
    for name, field in fields.items():
        value = index.metadata[name]
        expected = field.contents()
        if isinstance(value, np.ndarray):
            assert value.dtype == gguf.GGUFReader.gguf_scalar_to_np[field.types[-1]]
            value = value.tolist()
        assert value == expected
        assert type(value) is type(expected)


def test_trained_model_as_the_gguf_package_reads_it(demo_model):
    index = GgufIndex.open(demo_model)
    assert index.architecture == "hy_v3"
    assert_same_as_reader(index, demo_model)


def test_every_shared_file_as_the_gguf_package_reads_it(shared_dir):
    paths = sorted(shared_dir.glob("*/*.gguf"))
    assert len(paths) > 10
    for path in paths:
        assert_same_as_reader(GgufIndex.open(path), path)


def test_tensor_extents_hold_the_bytes_that_were_written(tmp_path, gguf_factory):
    model = gguf_factory.hy3_model()
    path = model.write(tmp_path / "m.gguf")
    raw = path.read_bytes()
    index = GgufIndex.open(path)
    assert set(index.tensors) == set(model.tensors)
    for name, tensor in index.tensors.items():
        assert tensor.shape == model.tensors[name].shape
        data = raw[tensor.offset : tensor.offset + tensor.byte_count]
        assert data == model.tensors[name].data.tobytes()


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_alignment_of_the_file_is_honoured(tmp_path, gguf_factory, alignment):
    model = gguf_factory.hy3_model(n_layers=1, tokenizer=False)
    path = model.write(tmp_path / "m.gguf", alignment=alignment)
    index = GgufIndex.open(path)
    assert index.alignment == alignment
    assert_same_as_reader(index, path)


ONE_OF_EACH = [
    (0, "B", 200),
    (1, "b", -100),
    (2, "H", 60_000),
    (3, "h", -30_000),
    (4, "I", 4_000_000_000),
    (5, "i", -2_000_000_000),
    (6, "f", 0.5),
    (7, "?", True),
    (10, "Q", 1 << 63),
    (11, "q", -(1 << 62)),
    (12, "d", 0.1),
]


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type_alone_and_in_an_array(tmp_path, gguf_bytes, version):
    keys = []
    for value_type, code, value in ONE_OF_EACH:
        pair = struct.pack(f"<2{code}", value, 0)
        keys.append(gguf_bytes.key(f"one.{value_type}", value_type, struct.pack(f"<{code}", value)))
        keys.append(gguf_bytes.array_key(f"many.{value_type}", value_type, 2, pair))
        keys.append(gguf_bytes.array_key(f"none.{value_type}", value_type, 0, b""))
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes.raw_gguf(tuple(keys), version=version))
    metadata = GgufIndex.open(path).metadata
    for value_type, code, value in ONE_OF_EACH:
        assert metadata[f"one.{value_type}"] == value
        assert type(metadata[f"one.{value_type}"]) is type(value)
        assert metadata[f"many.{value_type}"].tolist() == [value, 0]
        assert metadata[f"many.{value_type}"].dtype == np.dtype(f"<{code}")
        assert metadata[f"none.{value_type}"].dtype == np.dtype(f"<{code}")


def test_bytes_that_are_not_utf8_survive(tmp_path, gguf_bytes):
    raw = b"\xff\xc3("
    payload = gguf_bytes.string(raw) + gguf_bytes.string("ok")
    keys = (
        gguf_bytes.key("text", gguf_bytes.STRING, gguf_bytes.string(raw)),
        gguf_bytes.array_key("texts", gguf_bytes.STRING, 2, payload),
    )
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes.raw_gguf(keys))
    metadata = GgufIndex.open(path).metadata
    assert metadata["text"].encode("utf-8", "surrogateescape") == raw
    assert metadata["texts"][0].encode("utf-8", "surrogateescape") == raw
    assert metadata["texts"][1] == "ok"


def test_bool_array_of_odd_bytes_holds_true_bools(tmp_path, gguf_bytes):
    path = tmp_path / "m.gguf"
    flags = gguf_bytes.array_key("flags", gguf_bytes.BOOL, 4, b"\x00\x01\x02\xff")
    path.write_bytes(gguf_bytes.raw_gguf((flags,)))
    flags = GgufIndex.open(path).metadata["flags"]
    assert flags.view(np.uint8).tolist() == [0, 1, 1, 1]


@given(
    texts=st.lists(
        st.one_of(
            st.binary(max_size=12),
            st.integers(1, 40).map(lambda n: b"x" * n),
            st.integers(250, 300).map(lambda n: b"y" * n),
            st.integers(0, 20).map(bytes),  # zeros look like length fields
        ),
        max_size=60,
    ),
    window_bytes=st.sampled_from([8, 9, 64, 300, 1 << 16]),
)
def test_strings_of_any_shape_are_walked_over(tmp_path_factory, texts, window_bytes):
    path = tmp_path_factory.getbasetemp() / "strings.bin"
    path.write_bytes(b"".join(struct.pack("<Q", len(text)) + text for text in texts) + b"end")
    with pytest.MonkeyPatch.context() as patch, path.open("rb") as file:
        patch.setattr(gguf_header, "WALK_WINDOW_BYTES", window_bytes)
        patch.setattr(gguf_header, "READ_AHEAD_BYTES", 16)
        skipping = HeaderReader(file.fileno(), path)
        skipping.skip_strings(len(texts))
        assert skipping.raw(3) == b"end"
        decoded = HeaderReader(file.fileno(), path).strings(len(texts))
    assert [text.encode("utf-8", "surrogateescape") for text in decoded] == texts


def test_required_and_optional_keys(tmp_path, gguf_factory):
    model = gguf_factory.hy3_model(architecture="hy-v3", n_layers=1, vocab_count=300)
    model.metadata |= {"hy-v3.whole": 3, "hy-v3.nan": float("nan"), "hy-v3.sizes": [1, 2]}
    index = GgufIndex.open(model.write(tmp_path / "m.gguf"))
    assert index.architecture == "hy-v3"
    assert index.require("hy-v3.block_count", int) == 1
    assert index.arch_key("block_count", int) == 1
    assert index.arch_key("expert_weights_norm", bool) is True
    assert index.arch_key("sizes", np.ndarray).tolist() == [1, 2]
    assert len(index.require("tokenizer.ggml.tokens", list)) == 300
    whole = index.arch_key("whole", float)
    assert (whole, type(whole)) == (3.0, float)
    assert index.arch_optional("absent", int, 7) == 7
    assert index.optional("hy-v3.block_count", int, 7) == 1

    with pytest.raises(MalformedModel, match=r"lacks the key 'hy-v3\.absent'") as caught:
        index.arch_key("absent", int)
    assert caught.value.remedy
    for name, kind in [
        ("block_count", str),
        ("block_count", bool),
        ("expert_weights_norm", int),
        ("expert_weights_norm", float),
        ("rope.freq_base", int),
        ("nan", float),
        ("sizes", list),
        ("sizes", int),
    ]:
        with pytest.raises(MalformedModel, match=rf"'hy-v3\.{name}' is not"):
            index.arch_optional(name, kind, None)


def _append(path):
    with path.open("ab") as file:
        file.write(b"x")


def _touch(path):
    os.utime(path, ns=(0, 0))


def _replace(path):
    status = path.stat()
    copy = path.with_suffix(".copy")
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    copy.rename(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_append, r"its size has changed from \d+ to \d+ bytes"),
        (_touch, "it has been written to"),
        (_replace, "it has been replaced"),
        (os.unlink, "cannot be found"),
    ],
)
def test_changed_file_is_noticed(tmp_path, gguf_factory, change, reason):
    path = gguf_factory.hy3_model(n_layers=1).write(tmp_path / "m.gguf")
    index = GgufIndex.open(path)
    index.check_unchanged()
    change(path)
    with pytest.raises(ModelChanged, match=reason) as caught:
        index.check_unchanged()
    assert "streamd reload" in caught.value.remedy


def test_array_of_a_changed_file_is_not_served(tmp_path, gguf_factory):
    path = gguf_factory.hy3_model(n_layers=1).write(tmp_path / "m.gguf")
    index = GgufIndex.open(path)
    assert index.metadata["tokenizer.ggml.tokens"][0] == "<bos>"
    _replace(path)
    with pytest.raises(ModelChanged):
        index.metadata["tokenizer.ggml.tokens"]
