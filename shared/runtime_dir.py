"""Where daemons put their sockets, and how anybody finds the one that is meant.

    <directory>/<name>.lock   JSON of DaemonRecord; the daemon holds flock(2) on it while it lives
    <directory>/<name>.zmq    ZeroMQ ROUTER (ipc)
    <directory>/<name>.sock   SEQPACKET unix socket: attach, descriptors, liveness

The directory is $STREAMD_RUNTIME_DIR, else /run/streamd if it is ours (a service of the machine
made it that runs as this user), else $XDG_RUNTIME_DIR/streamd, else /run/streamd where we may make
it, else streamd-<uid> in the temporary directory. It is ours alone (0700), or, with `streamd
--group`, open to a group (0750); see shared/socket_group.py. Whoever looks for a daemon looks in
its own directory, then in /run/streamd if that is open to one of its groups.
"""

import fcntl
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from shared.errors import ConfigError, DaemonBusy, DaemonNotRunning
from shared.socket_group import (
    close_left_open,
    close_to_group,
    is_locked,
    is_open_to_us,
    open_to_group,
    share,
)

# struct sockaddr_un has 108 bytes for the path, the last one is the terminating zero.
MAX_SOCKET_PATH_BYTES = 107
SYSTEM_DIR = Path("/run/streamd")
START_ONE = "start one with: streamd --model FILE.gguf"
_LOCK_ATTEMPTS = 10
_LOCK_PAUSE_S = 0.01
_SHARD_NUMBER = re.compile(r"-[0-9]{5}-of-([0-9]{5})\.gguf$")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def runtime_dir() -> Path:
    """The directory, made if it is missing."""
    directory = _candidate()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise ConfigError(
            f"cannot make the socket directory {directory}: {error.strerror}",
            "set XDG_RUNTIME_DIR or STREAMD_RUNTIME_DIR to a directory of yours",
        ) from error
    if status.st_uid != os.getuid():
        raise ConfigError(
            f"the socket directory {directory} belongs to another user",
            "set STREAMD_RUNTIME_DIR to one of yours, or join the group that --group names there",
        )
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise ConfigError(
            f"the socket directory {directory} can be written by others",
            f"chmod 700 {directory}",
        )
    return directory


def lookup_dirs() -> list[Path]:
    """Where daemons may be that this user may talk to, its own directory first.

    Another user's daemon is looked for only where this user or root has said: in
    $STREAMD_RUNTIME_DIR, and in /run/streamd.
    """
    explicit = os.environ.get("STREAMD_RUNTIME_DIR")
    if explicit and is_open_to_us(Path(explicit)):
        return [Path(explicit)]
    own = runtime_dir()
    return [own, SYSTEM_DIR] if not explicit and is_open_to_us(SYSTEM_DIR) else [own]


def _candidate() -> Path:
    if explicit := os.environ.get("STREAMD_RUNTIME_DIR"):
        return Path(explicit)
    if _is_ours(SYSTEM_DIR):
        return SYSTEM_DIR
    if user_dir := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(user_dir, "streamd")
    if not SYSTEM_DIR.exists() and os.access(SYSTEM_DIR.parent, os.W_OK):
        return SYSTEM_DIR
    return Path(tempfile.gettempdir(), f"streamd-{os.getuid()}")


def _is_ours(directory: Path) -> bool:
    try:
        return directory.stat().st_uid == os.getuid()
    except OSError:
        return False


def is_daemon_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class DaemonRecord:
    """What a running daemon says about itself in its lock file.

    mtp: the MTP block that it serves, as shared.mtp.open_served takes it.
    """

    name: str
    pid: int
    model: str
    version: int
    mtp: str = ""


@dataclass(frozen=True)
class Endpoints:
    """gid: the group that may talk to the daemon too, None for its own user alone."""

    directory: Path
    name: str
    gid: int | None = None

    @classmethod
    def of(cls, name: str, gid: int | None = None) -> "Endpoints":
        """Of a daemon of this user. ConfigError for a name or a directory that sockets cannot
        have, and for a group that this user cannot let in."""
        directory = runtime_dir()
        if gid is not None:
            open_to_group(directory, gid, is_in_use=bool(_records_in(directory)))
        else:
            close_left_open(directory)
        return cls._checked(directory, name, gid)

    @classmethod
    def find(cls, name: str) -> "Endpoints":
        """Of a daemon that somebody wants to talk to: this user's own, else one of a group's."""
        places = [cls._checked(directory, name) for directory in lookup_dirs()]
        return next((place for place in places if place.lock_path.exists()), places[0])

    @classmethod
    def _checked(cls, directory: Path, name: str, gid: int | None = None) -> "Endpoints":
        if not is_daemon_name(name):
            raise ConfigError(
                f"{name!r} cannot be a daemon's name",
                "use up to 64 letters, digits, dots, dashes and underscores",
            )
        endpoints = cls(directory, name, gid)
        longest = max((endpoints.zmq_path, endpoints.unix_path), key=lambda p: len(os.fsencode(p)))
        length = len(os.fsencode(longest))
        if length > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"the socket path {longest} is {length} bytes long, {MAX_SOCKET_PATH_BYTES} fit",
                "give a shorter --name, or set STREAMD_RUNTIME_DIR to a shorter directory",
            )
        return endpoints

    def admit(self, socket_path: Path) -> None:
        """Let those connect that may be clients, whatever the umask was."""
        share(socket_path, 0o660, self.gid)

    @property
    def lock_path(self) -> Path:
        return self.directory / f"{self.name}.lock"

    @property
    def zmq_path(self) -> Path:
        return self.directory / f"{self.name}.zmq"

    @property
    def zmq_url(self) -> str:
        return f"ipc://{self.zmq_path}"

    @property
    def unix_path(self) -> Path:
        return self.directory / f"{self.name}.sock"


@contextmanager
def claim(endpoints: Endpoints, record: DaemonRecord) -> Iterator[None]:
    """Hold the name while the block runs; remove lock and sockets after it.

    DaemonBusy when a living daemon has the name. A dead one's leftovers are taken over.
    """
    fd = _lock(endpoints)
    try:
        for leftover in (endpoints.zmq_path, endpoints.unix_path):
            leftover.unlink(missing_ok=True)
        share(fd, 0o640, endpoints.gid)  # of whatever mode a leftover was
        if endpoints.gid is not None:  # another daemon that ended may just have closed it
            share(endpoints.directory, 0o750, endpoints.gid)
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(asdict(record)).encode(), 0)
        yield
    finally:
        for path in (endpoints.zmq_path, endpoints.unix_path, endpoints.lock_path):
            path.unlink(missing_ok=True)
        os.close(fd)
        if endpoints.gid is not None:
            close_to_group(endpoints.directory)


def _lock(endpoints: Endpoints) -> int:
    """The locked descriptor of a lock file that still has its name."""
    for _ in range(_LOCK_ATTEMPTS):
        try:
            fd = os.open(endpoints.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _no_lock(endpoints, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink > 0:
                return fd
            # Its former owner removed the file after we had opened it: take a new one.
        except BlockingIOError:
            # Somebody who only looks (running_daemons) holds it for a moment too.
            time.sleep(_LOCK_PAUSE_S)
        except OSError as error:
            os.close(fd)
            raise _no_lock(endpoints, error) from error
        os.close(fd)
    raise DaemonBusy(
        f"a daemon named {endpoints.name!r} is running already",
        f"give another --name, or stop it with: streamd stop --name {endpoints.name}",
    )


def _no_lock(endpoints: Endpoints, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot lock {endpoints.lock_path}: {error.strerror}",
        "set STREAMD_RUNTIME_DIR to a directory of yours on a local file system",
    )


def running_daemons() -> list[DaemonRecord]:
    """Every daemon that this user may talk to and that holds its lock, by name.

    Of two of one name the user's own counts.
    """
    found: dict[str, DaemonRecord] = {}
    for directory in lookup_dirs():
        for record in _records_in(directory):
            found.setdefault(record.name, record)
    return [found[name] for name in sorted(found)]


def _records_in(directory: Path) -> list[DaemonRecord]:
    records = map(_read_record, sorted(directory.glob("*.lock")))
    return [record for record in records if record is not None]


def _read_record(path: Path) -> DaemonRecord | None:
    # It may be gone, not ours to read, or just being written.
    with suppress(OSError, ValueError, TypeError), path.open("rb") as file:
        if is_locked(file.fileno()):
            return DaemonRecord(**json.loads(file.read(1 << 16)))
    return None  # a dead daemon's leftover too


def find_daemon(name: str | None, model: Path | None, remedy: str = START_ONE) -> DaemonRecord:
    """The daemon of that name, else the one that serves `model`, else the only one running.

    Raises DaemonNotRunning naming what was looked for and what there is; `remedy` is its own.
    """
    records = running_daemons()
    if name is not None:
        chosen = [record for record in records if record.name == name]
        wanted = f"named {name!r}"
    elif model is not None:
        chosen = [record for record in records if same_model(record.model, model)]
        wanted = f"that serves {model}"
    else:
        chosen, wanted = records, ""
    if len(chosen) == 1 or (chosen and model is not None):
        return chosen[0]
    if chosen:
        names = ", ".join(record.name for record in chosen)
        raise ConfigError(f"several daemons are running: {names}", "say which with --name")
    others = ", ".join(record.name for record in records)
    found = f"(running: {others})" if others else "is running"
    raise DaemonNotRunning(" ".join(filter(None, ("no daemon", wanted, found))), remedy)


def same_model(left: str | Path, right: str | Path) -> bool:
    """Whether both are there and name one file, or two shards of one split model."""
    try:
        return os.path.samefile(first_shard(left), first_shard(right))
    except OSError:
        return False


def first_shard(path: str | Path) -> Path:
    """The file that stands for a split model: `NAME-00001-of-0000N.gguf`."""
    path = Path(path)
    return path.with_name(_SHARD_NUMBER.sub(r"-00001-of-\1.gguf", path.name))
