"""What a prompt costs decoding, by real daemons; the figures are in docs/measurements.md."""

import measure_scan
import pytest

from infer.config import NO_PREFETCH, ModelConfig
from infer.daemon.daemon_process import EmbeddedDaemon
from shared.daemon_options import DaemonOptions
from shared.errors import ConfigError

CACHE_BYTES = 6 << 20


@pytest.fixture
def daemon(demo_model, tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMD_RUNTIME_DIR", str(tmp_path))
    options = DaemonOptions(host_cache=CACHE_BYTES, device="cpu")
    daemon = EmbeddedDaemon(demo_model, options, "scan")
    daemon.wait_ready()
    yield daemon
    daemon.close()


def test_a_round(daemon, demo_model, tmp_path):
    text = tmp_path / "text"
    text.write_text("The miller and his mule went down to the river. " * 8)
    (ids,) = measure_scan._parts(text, demo_model, daemon.name, 1, 60)
    assert len(ids) == 60
    config = ModelConfig(model=demo_model, name=daemon.name, device="cpu", prefetch=NO_PREFETCH)
    (one,) = measure_scan.measure(config, [ids], 16)
    assert all(0 < rate < 100 for rate in vars(one).values())
    with pytest.raises(ConfigError, match="2 prompts of 600"):
        measure_scan._parts(text, demo_model, daemon.name, 2, 600)
