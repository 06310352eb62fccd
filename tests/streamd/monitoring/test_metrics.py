"""The metrics server by itself; tests/e2e/test_monitoring.py has it in a daemon."""

import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.errors import ConfigError
from streamd.address import Address
from streamd.monitoring.metrics import MetricsServer


@pytest.fixture(autouse=True)
def nobody_serves(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMD_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("streamd.monitoring.metrics.ANSWER_DEADLINE_MS", 50)
    tmp_path.chmod(0o700)


def scrape(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_a_daemon_that_does_not_answer_is_told_as_such():
    with MetricsServer(Address("127.0.0.1", 0), "loading") as server:
        samples = scrape(server.address)
    assert samples["streamd_serving"] == 0
    assert samples["process_resident_memory_bytes"] > 0
    assert not any(name.startswith("streamd_expert") for name in samples)


def test_it_serves_over_ipv6_too():
    try:
        server = MetricsServer(Address("::1", 0), "loading")
    except ConfigError:
        pytest.skip("no IPv6 here")
    with server:
        assert scrape(server.address)["streamd_serving"] == 0


def test_one_that_connects_and_says_nothing_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("streamd.monitoring.metrics._Handler.timeout", 0.1)
    with (
        MetricsServer(Address("127.0.0.1", 0), "loading") as server,
        socket.create_connection(server.address),
    ):
        assert scrape(server.address)["streamd_serving"] == 0


def test_its_port_is_free_again_at_once():
    with MetricsServer(Address("127.0.0.1", 0), "one") as server:
        address = server.address
        with pytest.raises(ConfigError, match="cannot serve metrics at") as refusal:
            MetricsServer(address, "two")
    assert "--metrics" in refusal.value.remedy
    with MetricsServer(address, "one"):
        assert scrape(address)["streamd_serving"] == 0


def test_a_host_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"cannot serve metrics at 192\.0\.2\.1:9464"):
        MetricsServer(Address("192.0.2.1", 9464), "one")  # reserved for documentation
