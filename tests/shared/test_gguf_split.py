"""Models split over several files."""

import shutil

import pytest

from shared.errors import MalformedModel
from shared.gguf_index import GgufIndex


@pytest.fixture
def shards(tmp_path, gguf_factory):
    """The model and its three files, in order."""
    model = gguf_factory.hy3_model(n_layers=2, dense_layers=1)
    model.write(tmp_path / "m.gguf", shard_tensors=-(-len(model.tensors) // 3))
    paths = sorted(tmp_path.glob("*.gguf"))
    assert [path.name for path in paths] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    return model, paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_shard_opens_the_whole_model(shards, given):
    model, paths = shards
    index = GgufIndex.open(paths[given])
    assert index.paths == tuple(paths)
    assert len(index.fingerprints) == 3
    assert index.architecture == "hy_v3"
    assert index.metadata["tokenizer.ggml.tokens"][0] == "<bos>"
    contents = [path.read_bytes() for path in paths]
    assert set(index.tensors) == set(model.tensors)
    for name, tensor in index.tensors.items():
        data = contents[tensor.file_index][tensor.offset : tensor.offset + tensor.byte_count]
        assert data == model.tensors[name].data.tobytes()


def test_links_of_a_download_cache_keep_their_names(shards, tmp_path):
    _, paths = shards
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for at, path in enumerate(paths):
        shutil.move(path, blobs / f"blob{at}")
        (snapshot / path.name).symlink_to(blobs / f"blob{at}")
    assert len(GgufIndex.open(snapshot / paths[1].name).paths) == 3


def test_relative_path_survives_a_change_of_directory(shards, tmp_path, monkeypatch):
    _, paths = shards
    monkeypatch.chdir(tmp_path)
    index = GgufIndex.open(paths[0].name)
    monkeypatch.chdir("/")
    index.check_unchanged()


@pytest.mark.parametrize(("given", "gone"), [(0, 2), (2, 0)])
def test_missing_shard_is_named(shards, given, gone):
    _, paths = shards
    paths[gone].unlink()
    with pytest.raises(
        MalformedModel, match=f"shard {gone + 1} of 3 is missing: .*{paths[gone].name}"
    ):
        GgufIndex.open(paths[given])


def test_renamed_shard_is_refused(shards, tmp_path):
    _, paths = shards
    for name in ("other.gguf", "m-00003-of-00003.gguf", "m-00002-of-00004.gguf"):
        renamed = shutil.copy(paths[1], tmp_path / name)
        with pytest.raises(MalformedModel, match="is shard 2 of 3, but its name") as caught:
            GgufIndex.open(renamed)
        assert "NAME-00002-of-00003.gguf" in caught.value.remedy


def test_shard_in_anothers_place_is_refused(shards):
    _, paths = shards
    shutil.copy(paths[2], paths[1])
    with pytest.raises(MalformedModel, match=rf"{paths[1].name} says it is shard 3 of 3"):
        GgufIndex.open(paths[0])


def test_shard_of_another_model_is_refused(shards, tmp_path, gguf_factory):
    model, paths = shards
    other_dir = tmp_path / "other"
    other_dir.mkdir()
    whole = len(model.tensors)
    for name in list(model.tensors)[-2:]:
        del model.tensors[name]
    model.write(other_dir / "m.gguf", shard_tensors=-(-len(model.tensors) // 3))
    shutil.copy(other_dir / paths[2].name, paths[2])
    with pytest.raises(MalformedModel, match=f"have {whole - 2} tensors, not {whole}"):
        GgufIndex.open(paths[0])


def test_tensor_in_two_shards_is_refused(shards, gguf_bytes):
    _, paths = shards
    original = GgufIndex.open(paths[0])
    name = next(name for name, tensor in original.tensors.items() if tensor.file_index == 0)
    count = sum(tensor.file_index == 1 for tensor in original.tensors.values())
    keys = (
        gguf_bytes.key("split.no", gguf_bytes.U32, (1).to_bytes(4, "little")),
        gguf_bytes.key("split.count", gguf_bytes.U32, (3).to_bytes(4, "little")),
    )
    names = [name, *(f"filler{at}" for at in range(count - 1))]
    tensors = tuple(gguf_bytes.tensor(name, (8,), offset=32 * at) for at, name in enumerate(names))
    paths[1].write_bytes(gguf_bytes.raw_gguf(keys, tensors, bytes(32 * count)))
    with pytest.raises(MalformedModel, match=f"has the tensor '{name}' of another shard again"):
        GgufIndex.open(paths[2])


@pytest.mark.parametrize(
    ("number", "count", "reason"),
    [(3, 3, "split.no 3 of split.count 3"), (0, 60_000, "claims to be split into 60,000 files")],
)
def test_absurd_split_is_refused(shards, gguf_bytes, number, count, reason):
    _, paths = shards
    gguf_bytes.patch_scalar(paths[0], "split.no", number)
    gguf_bytes.patch_scalar(paths[0], "split.count", count)
    with pytest.raises(MalformedModel, match=reason):
        GgufIndex.open(paths[0])


def test_split_count_of_one_is_a_whole_model(tmp_path, gguf_bytes):
    keys = (gguf_bytes.key("split.count", gguf_bytes.U32, (1).to_bytes(4, "little")),)
    path = tmp_path / "any-name.gguf"
    path.write_bytes(gguf_bytes.raw_gguf(keys))
    assert GgufIndex.open(path).paths == (path,)


def test_a_partial_index_takes_shards_that_end_early(gguf_factory, tmp_path):
    """A header is enough to say what a model is, and not enough to serve it."""
    model = gguf_factory.hy3_model()
    first = model.write(tmp_path / "model.gguf", shard_tensors=20)
    whole = GgufIndex.open(first)
    for path in whole.paths:
        path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(MalformedModel, match="truncated"):
        GgufIndex.open(first)
    assert GgufIndex.open(first, partial=True).tensors == whole.tensors
