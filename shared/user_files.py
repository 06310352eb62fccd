"""Files that a user's programs keep: where they lie, and how one is replaced."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/streamd (~/.cache): what can be made again."""
    return _below("XDG_CACHE_HOME", ".cache")


def state_dir() -> Path:
    """$XDG_STATE_HOME/streamd (~/.local/state): what cannot."""
    return _below("XDG_STATE_HOME", ".local", "state")


def _below(variable: str, *default: str) -> Path:
    return Path(os.environ.get(variable) or Path.home().joinpath(*default), "streamd")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file of mode 0600 that takes the place of `path` when the block has ended, whole or not at
    all. Until then it is called .*, with the suffix of `path`. OSError; nothing is left of it then.
    """
    fd, name = tempfile.mkstemp(prefix=".", suffix=path.suffix, dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):  # it may have its name already
            os.unlink(name)
        raise
