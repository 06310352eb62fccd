"""A group that may talk to the daemon: who gives what to whom, and where it cannot be."""

import grp
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.runtime_dir import DaemonRecord, Endpoints, claim, lookup_dirs, running_daemons
from shared.socket_group import group_id, is_open_to_us, open_to_group, share

PROJECT_DIR = Path(__file__).resolve().parents[2]
GROUP, OTHER_GROUP, STRANGER_UID = 54321, 54322, 65534
# As another user of these groups, who may not be allowed to read the interpreter's files any more:
# evaluates what it is given and prints it.
STRANGER = """
import os, sys
from shared.runtime_dir import *
from shared import runtime_dir as module
uid, gid, groups, expression = sys.argv[1:]
os.setgroups([int(group) for group in groups.split()])
os.setgid(int(gid))
os.setuid(int(uid))
print(eval(expression))
"""
only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")


@pytest.fixture
def directory(monkeypatch):
    """One whose parents let everybody pass, which those of `tmp_path` do not."""
    with tempfile.TemporaryDirectory(prefix="sg-") as path:
        Path(path).chmod(0o755)
        monkeypatch.setenv("STREAMD_RUNTIME_DIR", f"{path}/run")
        yield Path(path, "run")


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def record(name):
    return DaemonRecord(name, 1, "/m.gguf", 1)


def as_a_stranger(expression, gid, *groups, uid=STRANGER_UID, directory=None):
    environment = {"PYTHONPATH": str(PROJECT_DIR), "PATH": os.environ["PATH"]}
    if directory is not None:
        environment["STREAMD_RUNTIME_DIR"] = str(directory)
    words = [str(uid), str(gid), " ".join(map(str, groups)), expression]
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or done.stderr.splitlines()[-1]


def test_a_group_by_name():
    assert group_id(grp.getgrgid(0).gr_name) == 0
    with pytest.raises(ConfigError, match="no group 'no-such-group' here") as refusal:
        group_id("no-such-group")
    assert "getent group" in refusal.value.remedy


def test_what_is_given_to_a_group(directory):
    gid = os.getgid()
    endpoints = Endpoints.of("one", gid)
    assert mode_of(directory) == 0o750
    with claim(endpoints, record("one")):
        assert mode_of(endpoints.lock_path) == 0o640
        endpoints.unix_path.touch()
        endpoints.admit(endpoints.unix_path)
        assert mode_of(endpoints.unix_path) == 0o660
        assert {path.stat().st_gid for path in (directory, *directory.iterdir())} == {gid}


def test_without_a_group_it_is_for_the_user_alone(directory):
    endpoints = Endpoints.of("one")
    assert mode_of(directory) == 0o700
    endpoints.lock_path.touch(mode=0o644)  # of an earlier one
    with claim(endpoints, record("one")):
        assert mode_of(endpoints.lock_path) == 0o600


@only_root
def test_the_last_daemon_with_a_group_closes_the_directory(directory):
    one, two = Endpoints.of("one", GROUP), Endpoints.of("two", GROUP)
    with claim(Endpoints.of("alone"), record("alone")):
        with claim(one, record("one")):
            with claim(two, record("two")):
                pass
            assert (mode_of(directory), directory.stat().st_gid) == (0o750, GROUP)
        assert (mode_of(directory), directory.stat().st_gid) == (0o700, os.getegid())
        with claim(two, record("two")):
            assert mode_of(directory) == 0o750, "closed since it was looked at"


@only_root
def test_after_one_that_was_killed_the_next_without_a_group_closes_it(directory):
    killed = Endpoints.of("killed", GROUP)
    killed.lock_path.touch()
    share(killed.lock_path, 0o640, GROUP)
    with claim(Endpoints.of("one", GROUP), record("one")):
        Endpoints.of("two")
        assert mode_of(directory) == 0o750, "one lives"
        directory_of_one = directory.stat().st_gid
    assert directory_of_one == GROUP
    directory.chmod(0o750)
    Endpoints.of("two")
    assert (mode_of(directory), directory.stat().st_gid) == (0o700, os.getegid())


def test_a_directory_that_no_daemon_has_opened_stays_as_it_is(directory):
    directory.mkdir()
    directory.chmod(0o750)
    with claim(Endpoints.of("one"), record("one")):
        assert mode_of(directory) == 0o750


def test_a_user_who_is_no_member(directory, monkeypatch):
    def chown(target, uid, gid):
        raise PermissionError

    directory.mkdir()
    monkeypatch.setattr("shared.socket_group.os.chown", chown)
    with pytest.raises(ConfigError, match="no member of the group '54321'") as refusal:
        share(directory, 0o750, GROUP)
    assert "run the daemon as a member" in refusal.value.remedy


@only_root
def test_the_kernel_refuses_a_user_who_is_no_member(directory):
    directory.mkdir(mode=0o700)
    os.chown(directory, STRANGER_UID, STRANGER_UID)
    expression = f'Endpoints.of("one", {GROUP})'
    said = as_a_stranger(expression, STRANGER_UID, directory=directory)
    assert "no member of the group '54321'" in said
    assert mode_of(directory) == 0o700
    said = as_a_stranger(expression, STRANGER_UID, GROUP, directory=directory)
    assert said.startswith("Endpoints(")
    assert (mode_of(directory), directory.stat().st_gid) == (0o750, GROUP)


def test_a_directory_that_members_cannot_reach(directory):
    directory.mkdir()
    directory.parent.chmod(0o700)
    with pytest.raises(ConfigError, match=f"{directory.parent} is closed to them") as refusal:
        open_to_group(directory, GROUP, is_in_use=False)
    assert "STREAMD_RUNTIME_DIR" in refusal.value.remedy
    assert mode_of(directory) != 0o750


@only_root
def test_a_parent_of_the_group_is_passed_by_its_own_bit(directory):
    directory.mkdir()
    os.chown(directory.parent, -1, GROUP)
    directory.parent.chmod(0o705)
    with pytest.raises(ConfigError, match="closed to them"):
        open_to_group(directory, GROUP, is_in_use=False)
    directory.parent.chmod(0o710)
    open_to_group(directory, GROUP, is_in_use=False)
    assert directory.stat().st_gid == GROUP


@only_root
def test_a_directory_has_one_group_while_it_is_in_use(directory):
    with claim(Endpoints.of("one", GROUP), record("one")):
        with pytest.raises(ConfigError, match="serves the group '54321' already"):
            Endpoints.of("two", OTHER_GROUP)
        Endpoints.of("two", GROUP)
        Endpoints.of("three")
        assert mode_of(directory) == 0o750
    Endpoints.of("two", OTHER_GROUP)
    assert directory.stat().st_gid == OTHER_GROUP


@only_root
@pytest.mark.parametrize(("groups", "found"), [([GROUP], "['one']"), ([], None)])
def test_members_find_the_daemon_that_is_named_to_them(directory, groups, found):
    names = "[daemon.name for daemon in running_daemons()]"
    with claim(Endpoints.of("one", GROUP), record("one")):
        said = as_a_stranger(names, OTHER_GROUP, *groups, directory=directory)
        assert said == found or (found is None and "ConfigError" in said)


@only_root
def test_members_find_the_machine_s_daemon_beside_their_own(directory, monkeypatch):
    """In /run/streamd, which root has made; `module.SYSTEM_DIR` stands for it."""
    with claim(Endpoints.of("one", GROUP), record("one")):
        setting = f"setattr(module, 'SYSTEM_DIR', module.Path({str(directory)!r})) or "
        found = setting + "(len(lookup_dirs()), Endpoints.find('one').directory)"
        assert as_a_stranger(found, GROUP) == f"(2, {directory!r})"
        missed = setting + "len(lookup_dirs())"
        assert as_a_stranger(missed, OTHER_GROUP) == "1"


def test_of_two_of_one_name_one_s_own_counts(directory, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    Endpoints.of("one")
    monkeypatch.setattr("shared.runtime_dir.lookup_dirs", lambda: [directory, other])
    with claim(Endpoints(other, "one"), record("theirs")):
        assert Endpoints.find("one").directory == other
        with claim(Endpoints(directory, "one"), record("ours")):
            assert Endpoints.find("one").directory == directory
            assert {found.name for found in running_daemons()} == {"ours", "theirs"}
    with (
        claim(Endpoints(other, "one"), DaemonRecord("one", 1, "/theirs.gguf", 1)),
        claim(Endpoints(directory, "one"), DaemonRecord("one", 1, "/ours.gguf", 1)),
    ):
        assert [found.model for found in running_daemons()] == ["/ours.gguf"]


@only_root
@pytest.mark.parametrize(
    ("uid", "gid", "mode", "is_open"),
    [
        (STRANGER_UID, 0, 0o750, True),
        (0, 0, 0o750, False),  # our own is no other user's
        (STRANGER_UID, GROUP, 0o750, False),
        (STRANGER_UID, 0, 0o770, False),  # any member could put a socket there
        (STRANGER_UID, 0, 0o757, False),
        (STRANGER_UID, 0, 0o710, False),
        (STRANGER_UID, 0, 0o700, False),
    ],
)
def test_whose_directories_are_looked_into(directory, uid, gid, mode, is_open):
    directory.mkdir()
    os.chown(directory, uid, gid)
    directory.chmod(mode)
    assert is_open_to_us(directory) == is_open
    if not is_open and uid:
        with pytest.raises(ConfigError, match="belongs to another user"):
            lookup_dirs()


def test_what_is_not_there_is_not_open(directory):
    assert not is_open_to_us(directory)
