"""A group whose members may talk to a daemon of another user: `streamd --group NAME`.

    <directory>          0750    members may enter it
    <name>.lock          0640    they see that the daemon runs, and what it serves
    <name>.zmq, .sock    0660    they may connect; the daemon asks the kernel who they are
                                 (streamd/peers.py)

All of the group, and without the bits in the middle where there is none. The last daemon with a
group that ends closes the directory again; after one that was killed, the next without a group.
"""

import fcntl
import grp
import os
import stat
from contextlib import suppress
from pathlib import Path

from shared.errors import ConfigError

OTHER_DIRECTORY = "give STREAMD_RUNTIME_DIR another directory, to members too"


def group_id(name: str) -> int:
    """The number of a group; ConfigError where there is none of that name."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise ConfigError(
            f"there is no group {name!r} here",
            "give --group one of those that `getent group` lists",
        ) from error


def share(target: Path | int, mode: int, gid: int | None) -> None:
    """Give a file of ours to the group, with `mode`; without a group, what of it is the owner's.

    ConfigError if this user may not give files to that group.
    """
    if gid is None:
        os.chmod(target, mode & 0o700)
        return
    try:
        os.chown(target, -1, gid)
    except PermissionError as error:
        raise ConfigError(
            f"this user is no member of the group {_group_name(gid)!r} and can let nobody in by it",
            "run the daemon as a member (log in anew after joining), or leave --group out",
        ) from error
    os.chmod(target, mode)


def open_to_group(directory: Path, gid: int, is_in_use: bool) -> None:
    """Let members into the socket directory. ConfigError where that cannot be, or is no use.

    is_in_use: whether there is a daemon already, whose clients' group must not be changed.
    """
    status = directory.stat()
    if is_in_use and stat.S_IMODE(status.st_mode) & 0o010 and status.st_gid != gid:
        raise ConfigError(
            f"a daemon in {directory} serves the group {_group_name(status.st_gid)!r} already",
            OTHER_DIRECTORY,
        )
    for parent in directory.resolve().parents:
        if not _may_pass(parent, gid):
            raise ConfigError(
                f"members of the group {_group_name(gid)!r} cannot reach {directory}:"
                f" {parent} is closed to them",
                OTHER_DIRECTORY,
            )
    share(directory, 0o750, gid)


def close_to_group(directory: Path) -> None:
    """Make it ours alone again, unless a daemon that lives lets a group in."""
    shared_locks = [path for path in directory.glob("*.lock") if _is_shared(path)]
    if not any(_is_held(path) for path in shared_locks):
        with suppress(FileNotFoundError):
            os.chown(directory, -1, os.getegid())
            os.chmod(directory, 0o700)


def close_left_open(directory: Path) -> None:
    """Do so if a daemon with a group was killed here, which could not; its lock file is left."""
    if any(_is_shared(path) and not _is_held(path) for path in directory.glob("*.lock")):
        close_to_group(directory)


def _is_shared(lock_path: Path) -> bool:
    try:
        return stat.S_IMODE(lock_path.stat().st_mode) == 0o640
    except FileNotFoundError:  # its daemon has just ended
        return False


def _is_held(lock_path: Path) -> bool:
    try:
        with lock_path.open("rb") as file:
            return is_locked(file.fileno())
    except FileNotFoundError:
        return False


def is_locked(fd: int) -> bool:
    """Whether the daemon whose lock file that is lives; the kernel releases a dead one's lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def is_open_to_us(directory: Path) -> bool:
    """Whether it is another user's who lets us in as members of a group, and writes it alone."""
    try:
        status = directory.stat()
    except OSError:
        return False
    mode = stat.S_IMODE(status.st_mode)
    is_member = status.st_gid in {os.getegid(), *os.getgroups()}
    return status.st_uid != os.getuid() and is_member and mode & 0o072 == 0o050


def _may_pass(directory: Path, gid: int) -> bool:
    status = directory.stat()
    return bool(status.st_mode & (stat.S_IXGRP if status.st_gid == gid else stat.S_IXOTH))


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
