"""How our functions are compiled, and where the machine code is kept between runs.

numba keys a cached function by its own source file, not by those of the functions it calls. So the
cache lies in a directory named by a hash over all the sources here: $XDG_CACHE_HOME (or ~/.cache)
/streamd/numba-<hash>. numba itself keys by processor.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba

from shared.user_files import cache_dir

UNUSED_CACHE_DAYS = 30

# Division by zero follows IEEE 754 and nothing raises: there is no Python to raise into.
_OPTIONS = {"error_model": "numpy"}


def kernel(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile for calls from Python, without the GIL, or load from the cache."""

    def compiled(function: Callable[..., Any]) -> Any:
        with _cache_directory() as cached:
            return numba.njit(signature, cache=cached, nogil=True, **_OPTIONS)(function)

    return compiled


def worker(function: Callable[..., Any]) -> int:
    """Compile `function(job_at: int64)` for calls from compiled code; the result is its address.

    Every thread of a team calls it with the same job and takes items until none are left.
    """
    return _address("void(int64)", function)


def converter(function: Callable[..., Any]) -> int:
    """As `worker`, of `function(source: int64, target: int64, count: int64)`."""
    return _address("void(int64, int64, int64)", function)


def _address(signature: str, function: Callable[..., Any]) -> int:
    with _cache_directory() as cached:
        compiled = numba.cfunc(signature, cache=cached, **_OPTIONS)(function)
    _KEPT.append(compiled)
    return compiled.address


def inner(function: Callable[..., Any]) -> Any:
    """Part of the kernels that call it."""
    return numba.njit(**_OPTIONS)(function)


def inner_sum(function: Callable[..., Any]) -> Any:
    """Like `inner`, and sums may be reordered into vector lanes.

    The order is fixed when compiled: it depends on lengths only, never on data or threads.
    """
    return numba.njit(fastmath={"reassoc", "nsz", "contract"}, **_OPTIONS)(function)


def cache_directory() -> Path:
    """Where this version's machine code lies; it does not exist before the first compilation."""
    return cache_dir() / f"numba-{_SOURCE_HASH}"


# Machine code lives as long as the object that numba returns.
_KEPT: list[Any] = []


def source_hash(folder: Path) -> str:
    """Changes with numba's version and with any Python source in the folder."""
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(folder.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


_SOURCE_HASH = source_hash(Path(__file__).parent)


@contextmanager
def _cache_directory() -> Iterator[bool]:
    """Direct numba's cache to our directory; False where none can be written."""
    usable = _prepare(cache_directory())
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(cache_directory())
    try:
        yield usable
    finally:
        numba.config.CACHE_DIR = before


def _prepare(directory: Path) -> bool:
    try:
        if not directory.exists():
            directory.mkdir(parents=True, exist_ok=True)
            _remove_unused(directory.parent)
        if time.time() - directory.stat().st_mtime > 86400:
            os.utime(directory)
    except OSError:
        return False
    return os.access(directory, os.W_OK)


def _remove_unused(parent: Path) -> None:
    """Drop the machine code of versions that have not run for a month."""
    oldest = time.time() - UNUSED_CACHE_DAYS * 86400
    for other in parent.glob("numba-*"):
        if other.stat().st_mtime < oldest:
            shutil.rmtree(other, ignore_errors=True)
