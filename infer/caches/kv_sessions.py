"""Past conversations on disk, so that what was computed once need not be computed again.

    <state>/sessions/<identity>/recent/<time>.kv    kept by themselves, the oldest give way
    <state>/sessions/<identity>/saved/<name>.kv     the user's, until he deletes them

<identity> is the digest of all that must be the same for a cache to be of use (kv_file.Identity),
so another model's conversations are not even looked at.
"""

import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from infer.caches.kv_file import SUFFIX, Head, Identity, KvFile, Planes, token_bytes, write
from infer.caches.kv_limits import KvLimits
from shared.errors import ConfigError, RequestError, StreamError, cause_of
from shared.sizes import size_text
from shared.user_files import state_dir

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# What a process that was killed while it wrote has left behind is removed after this time.
_LEFTOVER_S = 3600.0


class KvSessions:
    """The conversations of one `identity`. `tell` takes lines for the user."""

    def __init__(
        self, root: Path, identity: Identity, limits: KvLimits, tell: Callable[[str], None]
    ) -> None:
        """ConfigError where `root` is not ours alone."""
        self._root = root
        self._identity = identity
        self._limits = limits
        self._tell = tell
        directory = root / identity.digest
        self._recent, self._saved = directory / "recent", directory / "saved"
        if root.exists():
            _make_private(root)

    # By themselves

    def recall(self, ids: Sequence[int], planes: Planes) -> int:
        """Fill the planes with the longest beginning of `ids` that any conversation has.

        Returns how many tokens that is; 0 where there is none, or it turned out to be damaged.
        """
        if not self._limits:
            return 0
        best_path, best_count = None, 0
        for path in (*_files(self._recent), *_files(self._saved)):
            head = self._head(path)
            if head is not None and (count := common_count(head.ids, ids)) > best_count:
                best_path, best_count = path, count
        if best_path is None:
            return 0
        try:
            with self._open(best_path) as file:
                # Read again, and by now perhaps another one.
                count = common_count(file.head.ids, ids)
                file.restore(planes, count)
        except (OSError, RequestError) as error:
            self._tell(f"ignored: {_reason(error)}")
            return 0
        _touch(best_path)
        return count

    def keep(self, ids: Sequence[int], talk: dict[str, Any], planes: Planes) -> None:
        """Save the conversation whose tokens the planes begin with, within the limits.

        Those that it continues go. What keeps it from being saved is told, never raised.
        """
        ids = tuple(ids)
        if not (self._limits and ids):
            return
        size_bytes = len(ids) * token_bytes(planes)
        if size_bytes > self._limits.size_bytes:
            self._tell(
                f"this conversation's KV cache takes {size_text(size_bytes)}, more than"
                f" --kv-sessions allows ({size_text(self._limits.size_bytes)}): not kept"
            )
            return
        continued = []
        for path in _files(self._recent):
            head = self._head(path)
            if head is not None and (head.ids, head.talk) == (ids, talk):
                _touch(path)
                return
            if head is not None and head.ids == ids[: len(head.ids)]:
                continued.append(path)
        path = self._recent / f"{time.time_ns():020d}-{os.getpid()}{SUFFIX}"
        try:
            self._write(path, ids, talk, planes)
        except (OSError, StreamError) as error:
            self._tell(f"this conversation is not kept: {_reason(error)}")
            return
        for old in continued:
            old.unlink(missing_ok=True)
        self._make_room()

    # By name

    @property
    def names(self) -> list[str]:
        return sorted(path.stem for path in _files(self._saved))

    def save(self, name: str, ids: Sequence[int], talk: dict[str, Any], planes: Planes) -> Path:
        """Under a name, in the place of what had it. RequestError where that is impossible."""
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"{name!r} cannot be a session's name",
                "use up to 64 letters, digits, dots, dashes and underscores, a letter or digit"
                " first",
            )
        if not ids:
            raise RequestError("there is nothing to save yet", "say something first")
        path = self._saved / f"{name}{SUFFIX}"
        try:
            self._write(path, ids, talk, planes)
        except (OSError, ConfigError) as error:
            remedy = "see the permissions of that directory and what room its disk has"
            raise RequestError(f"{path} cannot be written: {_reason(error)}", remedy) from error
        return path

    def find(self, name: str, context: int) -> KvFile:
        """The session of that name, else the latest that has one, else the latest of the recent
        ones; open for reading.

        RequestError where there is none, it is not sound, or `context` has no room for it.
        """
        path = self._saved / f"{name}{SUFFIX}" if name else self._latest()
        try:
            if name and not _NAME.fullmatch(name):
                raise FileNotFoundError
            file = self._open(path)
        except FileNotFoundError:
            raise self._missing(name) from None
        except OSError as error:
            raise RequestError(
                f"{path} cannot be read: {_reason(error)}", "see its permissions"
            ) from error
        token_count = len(file.head.ids)
        if token_count > context:
            with file:
                raise RequestError(
                    f"the session has {token_count} tokens, the context has room for {context}",
                    "start again with a larger --ctx",
                )
        return file

    def label(self, file: KvFile) -> str:
        """What the user may call that one."""
        if file.path.parent == self._saved:
            return f"saved as {file.path.stem}"
        return "the latest conversation, kept without a name"

    def _missing(self, name: str) -> RequestError:
        """Tells of a session of that name that is another identity's."""
        if _NAME.fullmatch(name):
            for path in _files(*self._root.glob("*/saved")):
                head = self._foreign_head(path) if path.stem == name else None
                if head is not None:
                    how, remedy = self._identity.difference(head.identity)
                    return RequestError(
                        f"the session {name!r} was saved {how}: it cannot be used here", remedy
                    )
        return RequestError(f"there is no session {name!r} of this model", self._known())

    def _known(self) -> str:
        return f"there are: {', '.join(self.names) or 'none'}; /save NAME makes one"

    def _latest(self) -> Path:
        paths = _files(self._saved) or _files(self._recent)
        if not paths:
            raise RequestError("no conversation with this model is kept", self._known())
        return paths[0]

    # Files

    def _open(self, path: Path) -> KvFile:
        file = KvFile(path)
        if file.head.identity != self._identity:
            with file:
                raise RequestError(
                    f"{path} belongs to another model or arithmetic",
                    "it is in the wrong place: delete it",
                )
        return file

    def _foreign_head(self, path: Path) -> Head | None:
        """Whoever's it is; None where it cannot be read."""
        try:
            with KvFile(path) as file:
                return file.head
        except (OSError, RequestError):
            return None

    def _head(self, path: Path) -> Head | None:
        """None, with a word, for what is not sound."""
        try:
            with self._open(path) as file:
                return file.head
        except FileNotFoundError:  # another process has just made room
            return None
        except (OSError, RequestError) as error:
            self._tell(f"ignored: {_reason(error)}")
            return None

    def _write(self, path: Path, ids: Sequence[int], talk: dict[str, Any], planes: Planes) -> None:
        _make_private(self._root)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        size_bytes = len(ids) * token_bytes(planes)
        free_bytes = shutil.disk_usage(path.parent).free
        if 2 * size_bytes > free_bytes:
            raise RequestError(
                f"{size_text(size_bytes)} would take more than half of the {size_text(free_bytes)}"
                f" that {path.parent} has free",
                "make room there, or point XDG_STATE_HOME elsewhere",
            )
        write(path, self._identity, ids, talk, planes)

    def _make_room(self) -> None:
        """Delete the oldest of what all models have kept until that is within the limits."""
        paths = _files(*self._root.glob("*/recent"))
        total_bytes = 0
        for place, path in enumerate(paths):
            with suppress(OSError):
                total_bytes += path.stat().st_size
                over = total_bytes > self._limits.size_bytes and place > 0
                if over or place >= self._limits.session_count:
                    path.unlink()
        for leftover in self._root.glob(f"*/*/.*{SUFFIX}"):
            with suppress(OSError):
                if leftover.stat().st_mtime < time.time() - _LEFTOVER_S:
                    leftover.unlink()


def sessions_dir() -> Path:
    return state_dir() / "sessions"


def common_count(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens both begin with."""
    longest = min(len(left), len(right))
    return next((i for i in range(longest) if left[i] != right[i]), longest)


def _files(*directories: Path) -> list[Path]:
    """The sessions in some directories, the last used first."""
    found = []
    for directory in directories:
        for path in directory.glob(f"[!.]*{SUFFIX}"):
            with suppress(OSError):
                found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def _touch(path: Path) -> None:
    """Used: the last to give way."""
    with suppress(OSError):
        os.utime(path)


def _make_private(directory: Path) -> None:
    remedy = f"make {directory} a directory of yours alone (chmod 700), or use --kv-sessions off"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise ConfigError(f"cannot make {directory}: {error.strerror}", remedy) from error
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"{directory} can be read by others", remedy)


def _reason(error: OSError | StreamError) -> str:
    """In one line, without the remedy."""
    return error.message if isinstance(error, StreamError) else cause_of(error)
