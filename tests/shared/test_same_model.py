"""A split model is one model, whichever of its shards is named."""

from pathlib import Path

import pytest

from shared.runtime_dir import first_shard, same_model


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("m-00003-of-00005.gguf", "m-00001-of-00005.gguf"),
        ("m-00001-of-00005.gguf", "m-00001-of-00005.gguf"),
        ("m.gguf", "m.gguf"),
        ("m-3-of-5.gguf", "m-3-of-5.gguf"),
    ],
)
def test_the_first_shard_stands_for_all(name, first):
    assert first_shard(f"/models/{name}") == Path("/models", first)


def test_shards_links_and_copies(tmp_path):
    first = tmp_path / "m-00001-of-00002.gguf"
    other = tmp_path / "m-00002-of-00002.gguf"
    for path in (first, other):
        path.write_bytes(b"x")
    link = tmp_path / "link.gguf"
    link.symlink_to(first)
    assert same_model(other, first)
    assert same_model(link, other)
    assert not same_model(tmp_path / "absent.gguf", first)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(b"x")
    assert not same_model(copy, first)
