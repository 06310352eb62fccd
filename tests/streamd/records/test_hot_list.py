"""What was hot survives a daemon, if the model is still the same."""

import os

import numpy as np
import pytest

from shared.fingerprint import Fingerprint
from streamd.records.hot_list import MAX_LISTS, HotList, state_dir

SHAPE = (3, 5)
SHARDS = [Fingerprint(1, 2, 1000, 111), Fingerprint(1, 3, 2000, 222)]


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def hot_list(tmp_path):
    return HotList(tmp_path / "model.gguf", SHARDS, SHAPE)


@pytest.fixture
def heat():
    return np.arange(15, dtype=np.float32).reshape(SHAPE)


def test_it_comes_back(hot_list, heat):
    hot_list.save({"host": heat, "gpu": heat.reshape(-1) * 2})
    loaded = hot_list.load()
    assert np.array_equal(loaded["host"], heat)
    assert np.array_equal(loaded["gpu"], 2 * heat)
    assert [path.name for path in hot_list.path.parent.iterdir()] == [hot_list.path.name]


def test_a_tier_that_is_not_there_is_cold(hot_list, heat):
    hot_list.save({"host": heat})
    assert not hot_list.load()["gpu"].any()


def test_nothing_there_is_nothing_hot(hot_list):
    assert hot_list.load() == {}


def test_another_inode_is_the_same_model_and_another_time_is_not(hot_list, heat, tmp_path):
    hot_list.save({"host": heat})
    moved = [shard._replace(device=7, inode=8) for shard in SHARDS]
    assert HotList(tmp_path / "model.gguf", moved, SHAPE).load()
    rewritten = [SHARDS[0], SHARDS[1]._replace(mtime_ns=223)]
    other = HotList(tmp_path / "model.gguf", rewritten, SHAPE)
    assert other.load() == {}
    other.path.write_bytes(hot_list.path.read_bytes())
    assert other.load() == {}, "a file of that name with another model's list"


@pytest.mark.parametrize("cut", [0, 10, -20])
def test_a_damaged_list_is_empty(hot_list, heat, cut, caplog):
    hot_list.save({"host": heat})
    content = hot_list.path.read_bytes()
    hot_list.path.write_bytes(content[:cut])
    assert hot_list.load() == {}
    assert "cannot be read" in caplog.text


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_numbers_that_are_no_heat(hot_list, heat, bad):
    heat[1, 2] = bad
    hot_list.save({"host": heat})
    assert hot_list.load() == {}


def test_a_place_that_cannot_be_written_is_told_and_no_error(hot_list, heat, state, caplog):
    (state / "streamd").write_text("a file in the place of the directory")
    hot_list.save({"host": heat})
    assert "cannot be kept" in caplog.text


def test_a_failed_write_leaves_the_old_list(hot_list, heat, monkeypatch):
    hot_list.save({"host": heat})

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    hot_list.save({"host": heat * 2})
    monkeypatch.undo()
    assert np.array_equal(hot_list.load()["host"], heat)
    assert list(hot_list.path.parent.iterdir()) == [hot_list.path]


def test_where_it_is_kept(monkeypatch, state):
    assert state_dir() == state / "streamd"
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/streamd:/var/lib/other")
    assert str(state_dir()) == "/var/lib/streamd"


def test_there_are_only_so_many(tmp_path, heat):
    for number in range(MAX_LISTS + 3):
        shards = [SHARDS[0]._replace(mtime_ns=number)]
        hot_list = HotList(tmp_path / "model.gguf", shards, SHAPE)
        hot_list.save({"host": heat})
        os.utime(hot_list.path, (number, number))
    assert len(list(hot_list.path.parent.iterdir())) == MAX_LISTS
    assert hot_list.load()
