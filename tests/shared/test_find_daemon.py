"""Which daemon is meant: by name, by model, or the only one."""

import pytest

from shared.errors import ConfigError, DaemonNotRunning
from shared.runtime_dir import DaemonRecord, Endpoints, claim, find_daemon


@pytest.fixture(autouse=True)
def directory(tmp_path_factory, monkeypatch):
    path = tmp_path_factory.mktemp("run")
    path.chmod(0o700)
    monkeypatch.setenv("STREAMD_RUNTIME_DIR", str(path))


def record(name, model):
    return DaemonRecord(name, 1, model, 1)


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "m.gguf"
    path.touch()
    return path


def test_none_is_running(model):
    for name, path in ((None, None), ("x", None), (None, model)):
        with pytest.raises(DaemonNotRunning, match=r"no daemon .*is running \(") as refusal:
            find_daemon(name, path)
        assert "start one" in refusal.value.remedy
    with pytest.raises(DaemonNotRunning) as refusal:
        find_daemon(None, None, remedy="of one's own")
    assert (refusal.value.message, refusal.value.remedy) == ("no daemon is running", "of one's own")


def test_the_only_one(model):
    with claim(Endpoints.of("one"), record("one", str(model))):
        expected = record("one", str(model))
        link = model.with_name("link.gguf")
        link.symlink_to(model)
        assert find_daemon(None, None) == expected
        assert find_daemon("one", None) == expected
        assert find_daemon(None, link) == expected
        for name, path in (("two", None), (None, model.with_name("absent.gguf")), ("two", model)):
            with pytest.raises(DaemonNotRunning, match=r"running: one"):
                find_daemon(name, path)


def test_one_of_several(model):
    other = model.with_name("other.gguf")
    other.touch()
    with (
        claim(Endpoints.of("a"), record("a", str(model))),
        claim(Endpoints.of("b"), record("b", str(other))),
        claim(Endpoints.of("c"), record("c", str(other))),
    ):
        assert find_daemon("b", None).name == "b"
        assert find_daemon(None, model).name == "a"
        assert find_daemon(None, other).name == "b", "either would do"
        with pytest.raises(ConfigError, match="several daemons are running: a, b, c") as refusal:
            find_daemon(None, None)
        assert "--name" in refusal.value.remedy
