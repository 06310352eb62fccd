"""Who may talk to the daemon: its own user, root, and a group if it has one."""

import os
import pwd
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from shared.errors import RequestError
from shared.runtime_dir import Endpoints
from shared.wire import HOST_TIER, Attach, encode
from streamd.control import Control
from streamd.peers import SO_PEERGROUPS, is_admitted

PATIENCE_S = 30.0
GROUP, OTHER_GROUP, STRANGER_UID = 54321, 54322, 65534
# Becomes somebody else, connects, asks to be let in, and says what came of it.
STRANGER = """
import os, socket, sys
path, message, uid, gid, *groups = sys.argv[1:]
os.setgroups([int(group) for group in groups])
os.setgid(int(gid))
os.setuid(int(uid))
unix = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    unix.connect(path)
    unix.send(bytes.fromhex(message))
    answer = unix.recv(1 << 16)
except PermissionError:
    sys.exit("kept out")
except (BrokenPipeError, ConnectionResetError):
    answer = b""
sys.exit("answered" if answer else "hung up")
"""
only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")


class Refuses:
    """A handler that hears everybody and lets nobody in; heard: how many have asked."""

    def __init__(self):
        self.heard_count = 0

    def attach(self, message):
        self.heard_count += 1
        raise RequestError("not today")

    def detach(self, ticket):
        raise AssertionError("nobody was attached")

    def request(self, message):
        raise AssertionError("nobody has sent a request")


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(prefix="ct-") as directory:
        yield Path(directory)


def fate_of(endpoints, handler, gid, *groups, uid=STRANGER_UID):
    """What becomes of a process of that user and those groups that asks to be let in."""
    control = Control(endpoints, handler)
    message = encode(Attach(os.getpid(), [], HOST_TIER)).hex()
    words = [str(endpoints.unix_path), message, *map(str, (uid, gid, *groups))]
    stranger = subprocess.Popen(
        [sys.executable, "-c", STRANGER, *words], stderr=subprocess.PIPE, text=True
    )
    deadline_s = time.monotonic() + PATIENCE_S
    while stranger.poll() is None and time.monotonic() < deadline_s:
        control.poll(50)
    stranger.kill()
    _, said = stranger.communicate()
    control.close()
    return said.strip()


def open_to_all(monkeypatch, directory):
    """As if a user had opened the directory and the sockets: permissions keep nobody out."""
    directory.chmod(0o755)
    monkeypatch.setattr(Endpoints, "admit", lambda self, path: path.chmod(0o666))


@pytest.mark.parametrize("gid", [None, os.getgid()])
def test_the_sockets_are_for_whom_they_are_whatever_the_umask(directory, gid):
    endpoints = Endpoints(directory, "test", gid)
    before = os.umask(0)
    try:
        control = Control(endpoints, Refuses())
    finally:
        os.umask(before)
    for path in (endpoints.zmq_path, endpoints.unix_path):
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if gid is None else 0o660)
    control.close()


@only_root
@pytest.mark.parametrize("gid", [None, GROUP])
def test_somebody_else_is_hung_up_on_unheard(directory, monkeypatch, gid):
    open_to_all(monkeypatch, directory)
    handler = Refuses()
    assert fate_of(Endpoints(directory, "test", gid), handler, OTHER_GROUP) == "hung up"
    assert handler.heard_count == 0


@only_root
@pytest.mark.parametrize("groups", [[GROUP], [OTHER_GROUP, GROUP]], ids=["primary", "other"])
def test_a_member_of_the_group_is_heard(directory, groups):
    """By the permissions that the daemon sets, and by its own look at the peer."""
    directory.chmod(0o750)
    os.chown(directory, -1, GROUP)
    handler = Refuses()
    endpoints = Endpoints(directory, "test", GROUP)
    assert fate_of(endpoints, handler, *groups) == "answered"
    assert handler.heard_count == 1
    assert fate_of(endpoints, handler, OTHER_GROUP) == "kept out"


@only_root
def test_a_member_is_nobody_to_a_daemon_without_a_group(directory):
    directory.chmod(0o750)  # from an earlier daemon
    os.chown(directory, -1, GROUP)
    assert fate_of(Endpoints(directory, "test"), Refuses(), GROUP) == "kept out"


class Peer:
    """A connection of a user of so many groups that the kernel's list does not fit."""

    def __init__(self, uid, gid):
        self.credentials = uid, gid

    def getsockopt(self, level, option, size):
        if option == SO_PEERGROUPS:
            raise OSError
        assert option == socket.SO_PEERCRED
        return b"".join(part.to_bytes(4, "little") for part in (1, *self.credentials))


def test_a_peer_of_too_many_groups_is_looked_up_in_the_group_database(monkeypatch):
    nobody = pwd.getpwuid(STRANGER_UID)
    monkeypatch.setattr(
        "streamd.peers.os.getgrouplist",
        lambda name, gid: [gid, GROUP] if name == nobody.pw_name else [],
    )
    assert is_admitted(Peer(nobody.pw_uid, OTHER_GROUP), GROUP)
    assert not is_admitted(Peer(nobody.pw_uid, OTHER_GROUP), GROUP + 7)
    assert not is_admitted(Peer(3_999_999_999, OTHER_GROUP), GROUP), "a user that nobody knows"


def test_our_own_processes_are_admitted():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert is_admitted(ours, None)
