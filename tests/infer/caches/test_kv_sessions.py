"""Which conversations are kept, which are found again, and what becomes of bad files."""

import dataclasses
import os

import pytest
import torch

from infer.caches.kv_cache import KvShape
from infer.caches.kv_file import Identity, describe_planes, token_bytes
from infer.caches.kv_limits import KvLimits, parse_kv_sessions
from infer.caches.kv_sessions import KvSessions
from shared.errors import ConfigError, RequestError

CPU = torch.device("cpu")
CONTEXT = 64
DEFAULT_LIMITS = KvLimits()
SHAPE = KvShape(2, 1, 4)


def _planes(value):
    planes = SHAPE.allocate(CONTEXT, True, CPU).planes()
    for plane in planes.values():
        plane.fill_(value)
    return planes


IDENTITY = Identity([[1, 2, 3]], describe_planes(_planes(0)), ["cpu", True], "t")


class Shelf:
    def __init__(self, root):
        self.root = root
        self.told = []

    def open(self, limits=DEFAULT_LIMITS, identity=IDENTITY):
        return KvSessions(self.root, identity, limits, self.told.append)

    def files(self, kind="recent"):
        return sorted(self.root.glob(f"*/{kind}/*.kv"))


@pytest.fixture
def shelf(tmp_path):
    return Shelf(tmp_path / "sessions")


def _recalled(sessions, ids):
    """How many tokens, and the value that their positions have."""
    planes = _planes(-1)
    count = sessions.recall(ids, planes)
    values = {float(x) for plane in planes.values() for x in plane[:, :count].flatten()}
    rest = {float(x) for plane in planes.values() for x in plane[:, count:].flatten()}
    assert rest <= {-1.0}
    return count, values


def test_the_longest_beginning_is_found(shelf):
    sessions = shelf.open()
    sessions.keep([1, 2, 3, 4], {}, _planes(1))
    sessions.keep([1, 2, 9, 9, 9, 9], {}, _planes(2))
    sessions.save("mine", [1, 2, 3, 4, 5, 8], {}, _planes(3))
    assert _recalled(sessions, [1, 2, 3, 4, 7]) in ((4, {1.0}), (4, {3.0}))
    assert _recalled(sessions, [1, 2, 9, 9, 9, 9, 9]) == (6, {2.0})
    assert _recalled(sessions, [1, 2, 3, 4, 5, 6, 7]) == (5, {3.0})
    assert _recalled(sessions, [5, 1, 2]) == (0, set())
    assert shelf.told == []


def test_a_conversation_replaces_those_that_it_continues(shelf):
    sessions = shelf.open()
    sessions.keep([1, 2, 3], {}, _planes(1))
    sessions.keep([1, 2, 4], {}, _planes(2))
    sessions.keep([1, 2, 3, 4], {}, _planes(3))
    assert len(shelf.files()) == 2
    before = shelf.files()
    sessions.keep([1, 2, 3, 4], {}, _planes(3))
    assert shelf.files() == before, "it is there already"
    sessions.keep([1, 2, 3, 4], {"messages": []}, _planes(3))
    assert len(shelf.files()) == 2


def test_the_least_recently_used_give_way(shelf):
    sessions = shelf.open(KvLimits(session_count=3))
    sessions.save("named", [9], {}, _planes(0))
    for first in (1, 2, 3):
        sessions.keep([first, 0], {}, _planes(first))
        for path in shelf.files():  # as if some time had passed
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 10**9))
    assert _recalled(sessions, [1, 0, 0])[0] == 2
    sessions.keep([4, 0], {}, _planes(4))
    assert [_recalled(sessions, [first, 0, 0])[0] for first in (1, 2, 3, 4)] == [2, 0, 2, 2]
    assert sessions.names == ["named"]


def test_models_share_the_limits_and_nothing_else(shelf):
    other = dataclasses.replace(IDENTITY, model=[[1, 2, 4]])
    shelf.open().keep([1, 2, 3], {}, _planes(1))
    assert _recalled(shelf.open(identity=other), [1, 2, 3, 4]) == (0, set())
    shelf.open(KvLimits(session_count=1), other).keep([1, 2, 3], {}, _planes(2))
    assert _recalled(shelf.open(), [1, 2, 3, 4]) == (0, set())
    assert _recalled(shelf.open(identity=other), [1, 2, 3, 4]) == (3, {2.0})
    assert shelf.told == []


@pytest.mark.parametrize(
    "change",
    [
        {"planes": describe_planes(KvShape(2, 1, 4).allocate(CONTEXT, False, CPU).planes())},
        {"arithmetic": ["cpu", False]},
        {"arithmetic": ["cuda", True]},
        {"template": "u"},
    ],
)
def test_whatever_makes_a_cache_another_one_is_told_apart(change, shelf):
    shelf.open().keep([1, 2, 3], {}, _planes(1))
    other = shelf.open(identity=dataclasses.replace(IDENTITY, **change))
    assert _recalled(other, [1, 2, 3, 4]) == (0, set())


def test_a_size_bounds_what_is_kept(shelf):
    row_bytes = token_bytes(_planes(0))
    sessions = shelf.open(KvLimits(size_bytes=40 * row_bytes))
    for first in range(4):
        sessions.keep([first] * 10, {}, _planes(first))
    total_bytes = sum(path.stat().st_size for path in shelf.files())
    assert 20 * row_bytes < total_bytes <= 40 * row_bytes
    sessions.keep([9] * 50, {}, _planes(9))
    assert _recalled(sessions, [9] * 60)[0] == 0
    assert len(shelf.told) == 1
    assert "more than --kv-sessions allows" in shelf.told[0]


def test_off_keeps_and_recalls_nothing(shelf):
    shelf.open().keep([1, 2, 3], {}, _planes(1))
    before = shelf.files()
    off = shelf.open(KvLimits(0, 0))
    off.keep([4, 5, 6], {}, _planes(2))
    assert _recalled(off, [1, 2, 3, 4]) == (0, set())
    assert shelf.files() == before


@pytest.mark.parametrize(
    ("place", "what"), [(0, "no KV session"), (30, "head"), (-30, "checksum of block")]
)
def test_a_damaged_file_is_ignored_in_one_line(place, what, shelf):
    sessions = shelf.open()
    sessions.keep([1, 2, 3], {}, _planes(1))
    (path,) = shelf.files()
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    assert sessions.recall([1, 2, 3, 4], _planes(-1)) == 0
    assert len(shelf.told) == 1
    assert shelf.told[0].startswith(f"ignored: {path} is damaged or foreign: ")
    assert what in shelf.told[0]
    assert "\n" not in shelf.told[0]


def test_a_file_in_the_wrong_place_is_ignored_in_one_line(shelf):
    other = dataclasses.replace(IDENTITY, model=[[9, 9, 9]])
    shelf.open(identity=other).keep([1, 2, 3], {}, _planes(1))
    shelf.open().keep([5], {}, _planes(1))
    (foreign,) = shelf.root.glob(f"{other.digest}/recent/*.kv")
    foreign.rename(shelf.root / IDENTITY.digest / "recent" / "x.kv")
    assert _recalled(shelf.open(), [1, 2, 3]) == (0, set())
    assert len(shelf.told) == 1
    assert "belongs to another model" in shelf.told[0]


def test_without_anything_saved_the_latest_is_found(shelf):
    sessions = shelf.open()
    sessions.keep([7, 8], {}, _planes(3))
    with sessions.find("", CONTEXT) as file:
        assert file.head.ids == (7, 8)
        assert sessions.label(file) == "the latest conversation, kept without a name"


def test_save_and_find_by_name(shelf):
    sessions = shelf.open()
    with pytest.raises(RequestError, match="no conversation with this model is kept"):
        sessions.find("", CONTEXT)
    sessions.save("trip", [1, 2, 3], {"messages": [1]}, _planes(1))
    sessions.save("trip", [1, 2, 3, 4], {"messages": [2]}, _planes(2))
    sessions.keep([7, 8], {"messages": [3]}, _planes(3))
    with sessions.find("trip", CONTEXT) as file:
        assert (file.head.ids, file.head.talk) == ((1, 2, 3, 4), {"messages": [2]})
        assert sessions.label(file) == "saved as trip"
    with sessions.find("", CONTEXT) as file:
        assert file.head.ids == (1, 2, 3, 4), "one that was saved, though another came later"
    with pytest.raises(RequestError, match="4 tokens, the context has room for 3") as refusal:
        sessions.find("trip", 3)
    assert "--ctx" in refusal.value.remedy
    for name in ("tripp", "../trip"):
        with pytest.raises(RequestError, match="there is no session") as refusal:
            sessions.find(name, CONTEXT)
        assert "trip" in refusal.value.remedy
    for name in ("", "a/b", ".hidden", "-x", "x" * 65):
        with pytest.raises(RequestError, match="cannot be a session's name") as refusal:
            sessions.save(name, [1], {}, _planes(0))
        assert "a letter or digit first" in refusal.value.remedy
    with pytest.raises(RequestError, match="nothing to save"):
        sessions.save("empty", [], {}, _planes(0))


@pytest.mark.parametrize(
    ("change", "how", "remedy"),
    [
        ({"arithmetic": ["cpu", False]}, "without --exact", "start again without --exact"),
        ({"arithmetic": ["cuda", True]}, "on the device cuda", "--device cuda"),
        ({"template": "u"}, "with another chat template", "the one that it was saved with"),
        ({"model": [[1, 2, 4]]}, "with another model file", "open that model"),
        ({"planes": []}, "with another layout of the KV cache", "options"),
    ],
)
def test_a_session_that_does_not_fit_is_not_denied(change, how, remedy, shelf):
    theirs = dataclasses.replace(IDENTITY, **change)
    shelf.open(identity=theirs).save("planet", [1, 2], {}, _planes(1))
    with pytest.raises(RequestError, match=f"'planet' was saved {how}") as refusal:
        shelf.open().find("planet", CONTEXT)
    assert remedy in refusal.value.remedy
    with pytest.raises(RequestError, match="there is no session 'moon'"):
        shelf.open().find("moon", CONTEXT)
    shelf.files("saved")[0].write_bytes(b"half")
    with pytest.raises(RequestError, match="there is no session 'planet'"):
        shelf.open().find("planet", CONTEXT)


def test_a_full_disk_is_told_and_left_alone(shelf, monkeypatch):
    usage = os.statvfs(shelf.root.parent)
    assert usage.f_bavail
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": 100})())
    shelf.open().keep([1, 2, 3], {}, _planes(1))
    assert shelf.files() == []
    assert "not kept" in shelf.told[0]
    with pytest.raises(RequestError, match="half of the"):
        shelf.open().save("trip", [1, 2, 3], {}, _planes(1))


def test_directories_of_others_are_refused(shelf):
    shelf.open().keep([1], {}, _planes(1))
    assert shelf.root.stat().st_mode & 0o777 == 0o700
    shelf.root.chmod(0o755)
    with pytest.raises(ConfigError, match="can be read by others"):
        shelf.open()


def test_what_a_killed_process_left_is_removed_in_time(shelf):
    shelf.open().keep([1], {}, _planes(1))
    old, young = (shelf.files()[0].with_name(f".{name}.kv") for name in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    shelf.open().keep([2], {}, _planes(1))
    assert (old.exists(), young.exists()) == (False, True)
    assert shelf.told == []


def test_the_option():
    assert not parse_kv_sessions("off")
    assert not parse_kv_sessions("0")
    assert parse_kv_sessions("3").session_count == 3
    assert parse_kv_sessions("2G").size_bytes == 2 << 30
    for text in ("many", "-1", "100000"):
        with pytest.raises(ValueError, match="give off, up to 1000 conversations, or a size"):
            parse_kv_sessions(text)
