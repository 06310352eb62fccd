"""The writer: what the gguf package reads of it, and what an interruption leaves."""

import json

import gguf
import numpy as np
import pytest
from gguf_layout import RawValue, TensorPlan, encode_value, write_header_only
from gguf_writing import ResumableFile

from shared.errors import ConfigError, MalformedModel
from shared.gguf_index import GgufIndex

METADATA = {
    "general.architecture": "hy_v3",
    "a.bool": True,
    "a.count": 7,
    "a.large": 1 << 40,
    "a.negative": -3,
    "a.float": 0.5,
    "a.texts": ["", "Ġthe", "\udce9"],  # the last: a byte that is no UTF-8
    "a.empty": np.zeros(0, np.int32),
    "a.types": [1, 3, 5],
    "a.flags": [True, False],
    "a.numbers": np.arange(3, dtype=np.uint64),
    "a.raw": RawValue(encode_value("as it was")),
}
PLANS = [
    TensorPlan("one", (3,), 0),
    TensorPlan("two", (4, 5), 0),
    TensorPlan("three", (2, 2, 3), 1),
]


def _data(plan):
    return np.random.default_rng(plan.byte_count).integers(0, 256, plan.byte_count, np.uint8)


def _open(path, *, plans=PLANS, sources=(), restart=False):
    return ResumableFile(path, METADATA, plans, sources, restart=restart)


def _write_all(file):
    for plan in file.tensors[file.next_tensor :]:
        file.write(np.array_split(_data(plan), 3))
    file.finish()


def test_the_gguf_package_reads_the_same(tmp_path):
    path = tmp_path / "x.gguf"
    with _open(path) as file:
        _write_all(file)
    reader = gguf.GGUFReader(path)
    for key, value in METADATA.items():
        if key not in ("a.texts", "a.empty", "a.raw"):
            found = reader.get_field(key).contents()
            assert found == (value if np.ndim(value) == 0 else list(value)), key
    assert reader.get_field("a.raw").contents() == "as it was"
    assert [(t.name, tuple(t.shape.tolist())) for t in reader.tensors] == [p[:2] for p in PLANS]
    for tensor, plan in zip(reader.tensors, PLANS, strict=True):
        assert tensor.data.tobytes() == _data(plan).tobytes()
    assert GgufIndex.open(path).metadata["a.texts"] == METADATA["a.texts"]
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]


def test_an_interrupted_run_goes_on_and_gives_the_same_file(tmp_path):
    whole, path = tmp_path / "whole.gguf", tmp_path / "x.gguf"
    with _open(whole) as file:
        _write_all(file)

    def produce():
        yield _data(PLANS[1])[:10]
        raise KeyboardInterrupt

    with _open(path) as file:
        file.write([_data(PLANS[0])])
        with pytest.raises(KeyboardInterrupt):
            file.write(produce())
    assert not path.exists()
    with _open(path) as file:
        assert file.next_tensor == 1
        _write_all(file)
    assert path.read_bytes() == whole.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["whole.gguf", "x.gguf"]


def test_a_torn_line_of_the_journal_is_done_again(tmp_path):
    path = tmp_path / "x.gguf"
    with _open(path) as file:
        file.write([_data(PLANS[0])])
    journal = tmp_path / "x.gguf.part.journal"
    journal.write_text(journal.read_text() + json.dumps({"done": 2})[:5])
    with _open(path) as file:
        assert file.next_tensor == 1
        _write_all(file)


def test_what_follows_a_torn_line_counts(tmp_path):
    path, journal = tmp_path / "x.gguf", tmp_path / "x.gguf.part.journal"
    with _open(path):
        pass
    journal.write_text(journal.read_text() + '{"don')
    with _open(path) as file:
        file.write([_data(PLANS[0])])
    with _open(path) as file:
        assert file.next_tensor == 1


def test_a_journal_that_is_none(tmp_path):
    journal = tmp_path / "x.gguf.part.journal"
    journal.write_bytes(b'[1]\n\xff{"plan"\n')
    with pytest.raises(ConfigError, match="begun with other"):
        _open(tmp_path / "x.gguf")


@pytest.mark.parametrize("damage", ["shorten", "overwrite"])
def test_a_part_that_is_not_what_the_journal_says_is_begun_again(tmp_path, damage):
    path, part = tmp_path / "x.gguf", tmp_path / "x.gguf.part"
    with _open(path) as file:
        file.write([_data(PLANS[0])])
        file.write([_data(PLANS[1])])
    data = part.read_bytes()
    part.write_bytes(data[:-1] if damage == "shorten" else b"?" + data[1:])
    with _open(path) as file:
        assert file.next_tensor == 0
        _write_all(file)


def test_another_plan_or_source_is_not_gone_on_with(tmp_path):
    path, source = tmp_path / "x.gguf", tmp_path / "source"
    source.write_bytes(b"1")
    with _open(path, sources=[source]) as file:
        file.write([_data(PLANS[0])])
    with pytest.raises(ConfigError, match="other types or other sources"):
        _open(path, plans=PLANS[::-1], sources=[source])
    source.write_bytes(b"12")
    with pytest.raises(ConfigError, match="--restart"):
        _open(path, sources=[source])
    with _open(path, sources=[source], restart=True) as file:
        assert file.next_tensor == 0
        _write_all(file)
    assert path.exists()


def test_two_runs_cannot_write_one_file(tmp_path):
    with _open(tmp_path / "x.gguf") as first:
        first.write([_data(PLANS[0])])
        with pytest.raises(ConfigError, match="is being written"):
            _open(tmp_path / "x.gguf")


def test_a_full_disk_is_noticed_before(tmp_path):
    plans = [TensorPlan("huge", (1 << 20, 1 << 26), 0)]
    with pytest.raises(ConfigError, match="GB are free"):
        _open(tmp_path / "x.gguf", plans=plans)


def test_a_header_alone_is_an_index_but_no_model(tmp_path):
    path = tmp_path / "x.gguf"
    total = write_header_only(path, METADATA, PLANS)
    index = GgufIndex.open(path, partial=True)
    assert [(t.name, t.shape, t.type_id) for t in index.tensors.values()] == PLANS
    assert path.stat().st_size < total
    with pytest.raises(MalformedModel, match="truncated"):
        GgufIndex.open(path)
