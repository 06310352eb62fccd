"""Compiled kernels survive the process, and are made anew when a source changes."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infer.kernels import ggml_cpu
from infer.kernels.numba_cache import UNUSED_CACHE_DAYS, cache_directory, source_hash, worker

DAY_S = 86400


def nothing(job_at):
    pass


@pytest.fixture
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_next_process_compiles_nothing():
    def state():
        files = (path for path in cache_directory().rglob("*") if path.is_file())
        return {path: path.stat().st_mtime_ns for path in files}

    before = state()
    assert any("multiply" in path.name for path in before)
    root = Path(ggml_cpu.__file__).parents[2]
    subprocess.run([sys.executable, "-c", "import infer.kernels.ggml_cpu"], check=True, cwd=root)
    # What is compiled is also written.
    assert state() == before


def test_compiled_code_goes_into_the_users_cache(cache_home):
    assert worker(nothing) != 0
    assert cache_directory().parent == cache_home / "streamd"
    assert list(cache_directory().rglob("*nothing*.nbc"))


def test_without_a_place_to_write_kernels_are_compiled_for_this_process(cache_home):
    cache_home.write_text("a file where a directory is wanted")
    assert worker(nothing) != 0


def test_versions_not_used_for_long_are_removed(cache_home):
    for name, age_days in (("numba-old", UNUSED_CACHE_DAYS + 1), ("numba-recent", 1)):
        (cache_home / "streamd" / name).mkdir(parents=True)
        then = time.time() - age_days * DAY_S
        os.utime(cache_home / "streamd" / name, (then, then))
    worker(nothing)
    kept = {path.name for path in (cache_home / "streamd").iterdir()}
    assert kept == {"numba-recent", cache_directory().name}


def test_hash_follows_every_source(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "b.py").write_text("x = 2")
    before = source_hash(tmp_path)
    assert source_hash(tmp_path) == before
    (tmp_path / "b.py").write_text("x = 3")
    assert source_hash(tmp_path) != before


def test_set_up_compiles_every_kernel():
    """So that no first answer waits for one: it imports each module that has compiled functions."""
    root = Path(ggml_cpu.__file__).parents[2]
    sources = [path for path in (root / "infer").rglob("*.py") if path.stem != "numba_cache"]
    compiled = {
        ".".join(path.relative_to(root).with_suffix("").parts)
        for path in sources
        if "infer.kernels.numba_cache import" in path.read_text()
    }
    assert len(compiled) > 8
    statement = re.search(r"-c '(import infer.*)'", (root / "tools" / "setup.sh").read_text())
    program = f"import sys; {statement[1]}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, cwd=root, capture_output=True, text=True
    )
    assert compiled <= set(done.stdout.split())
