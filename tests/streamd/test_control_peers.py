"""Who may talk to the daemon: its own user and root."""

import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from shared.runtime_dir import Endpoints
from shared.wire import HOST_TIER, Attach, encode
from streamd.control import Control

PATIENCE_S = 30.0
# Becomes somebody else, connects, asks to be let in, and says what came of it.
STRANGER = """
import os, socket, sys
os.setuid(65534)
unix = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
unix.connect(sys.argv[1])
try:
    unix.send(bytes.fromhex(sys.argv[2]))
    answer = unix.recv(1 << 16)
except (BrokenPipeError, ConnectionResetError):
    answer = b""
print("answered" if answer else "hung up")
"""


class NobodyExpected:
    """A handler that is never asked."""

    def attach(self, message):
        raise AssertionError("somebody was heard")

    def detach(self, ticket):
        raise AssertionError("nobody was attached")

    def request(self, message):
        raise AssertionError("somebody was heard")


@pytest.fixture
def endpoints():
    with tempfile.TemporaryDirectory(prefix="ct-") as directory:
        yield Endpoints(Path(directory), "test")


def test_the_sockets_are_ours_alone_whatever_the_umask(endpoints):
    before = os.umask(0)
    try:
        control = Control(endpoints, NobodyExpected())
    finally:
        os.umask(before)
    for path in (endpoints.zmq_path, endpoints.unix_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    control.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_somebody_else_is_hung_up_on_unheard(endpoints):
    control = Control(endpoints, NobodyExpected())
    endpoints.directory.chmod(0o755)  # as if a user had opened them
    endpoints.unix_path.chmod(0o666)
    attach = encode(Attach(os.getpid(), [], HOST_TIER))
    stranger = subprocess.Popen(
        [sys.executable, "-c", STRANGER, str(endpoints.unix_path), attach.hex()],
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline_s = time.monotonic() + PATIENCE_S
    while stranger.poll() is None and time.monotonic() < deadline_s:
        control.poll(50)
    stranger.kill()
    out, _ = stranger.communicate()
    control.close()
    assert out == "hung up\n"
