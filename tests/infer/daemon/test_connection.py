"""How a daemon that cannot be reached is told of."""

from types import SimpleNamespace

import pytest

from infer.daemon.connection import Connection
from shared.errors import DaemonLost
from shared.wire import HOST_TIER


def test_one_that_is_not_there_is_told_of_in_words(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMD_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    with pytest.raises(DaemonLost) as lost:
        Connection("one", SimpleNamespace(fingerprints=[]), None, HOST_TIER)
    gone = "the daemon 'one' is gone: it cannot be reached: No such file or directory"
    assert lost.value.message == gone
