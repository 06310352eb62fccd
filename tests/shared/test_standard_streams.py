"""Commands whose standard streams are closed or full end in order."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from shared.command import run_command
def command():
    fd = os.open("/dev/zero", os.O_RDONLY)
    assert fd > 2, fd
    print("said")
    return 7
sys.exit(run_command("p", command))
"""


def _run(redirection: str) -> subprocess.CompletedProcess[str]:
    words = ["sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, SCRIPT]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_nothing_else(redirection):
    done = _run(redirection)
    assert done.returncode == 7
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_said_in_a_line():
    done = _run(">/dev/full")
    assert done.returncode == 1
    assert done.stderr.startswith("p: the output cannot be written: No space")
    assert "Traceback" not in done.stderr
