"""Who is at the other end of a unix socket, by the kernel's word.

SO_PEERCRED    struct ucred: pid i32 | uid i32 | gid i32      as they were when it connected
SO_PEERGROUPS  u32 [...]                                      its other groups
"""

import os
import pwd
import socket
import struct

# asm-generic/socket.h; Python does not name it.
SO_PEERGROUPS = 59
# As much as Python's getsockopt takes: 256 groups.
_GROUPS_BYTES = 1024


def is_admitted(connection: socket.socket, gid: int | None) -> bool:
    """Whether the peer is this process's user, root, or of the group `gid` (None: no group)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, peer_uid, peer_gid = struct.unpack("iII", credentials)
    if peer_uid in (os.getuid(), 0):
        return True
    return gid is not None and (gid == peer_gid or gid in _other_groups(connection, peer_uid))


def _other_groups(connection: socket.socket, uid: int) -> list[int]:
    """The group database is asked only about peers of too many groups: it may be far away."""
    try:
        found = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:
        return _groups_by_database(uid)
    return list(struct.unpack(f"{len(found) // 4}I", found))


def _groups_by_database(uid: int) -> list[int]:
    try:
        user = pwd.getpwuid(uid)
        return os.getgrouplist(user.pw_name, user.pw_gid)
    except (KeyError, OSError):
        return []
