"""Where a user's files lie, and that one is replaced whole or not at all."""

import os
from pathlib import Path

import pytest

from shared.user_files import cache_dir, replacing, state_dir


def test_where_they_lie(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_dir() == tmp_path / ".cache" / "streamd"
    assert state_dir() == tmp_path / ".local" / "state" / "streamd"
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    assert (cache_dir(), state_dir()) == (Path("/c/streamd"), Path("/s/streamd"))


def test_a_file_is_replaced_when_all_is_written(tmp_path):
    path = tmp_path / "kept.bin"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        (other,) = set(os.listdir(tmp_path)) - {"kept.bin"}
        assert other.startswith(".")
        assert other.endswith(".bin")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["kept.bin"]


def _break_off(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt


def test_nothing_is_left_of_one_that_is_not(tmp_path):
    path = tmp_path / "kept.bin"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        _break_off(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["kept.bin"]


def test_an_interrupt_after_the_last_moment_changes_nothing(tmp_path, monkeypatch):
    path, replace = tmp_path / "kept.bin", os.replace

    def interrupted(*names):
        replace(*names)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
