"""What Prometheus is told, by its own parser and, where there is one, by Prometheus itself.

The counters are compared with what a client counts that looks up experts here.
"""

import json
import re
import shutil
import socket
import subprocess
import urllib.request
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana-streamd.json"
MISSES = 'streamd_expert_lookups_total{result="miss"}'


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def address():
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def daemon(module_place, demo_model, address):
    return module_place.daemon(
        demo_model, "--name", "demo", "--host-cache", "6M", "--metrics", address
    )


@pytest.fixture(scope="module")
def counting(daemon, slab_reader, demo_model):
    reader = slab_reader.CountingReader(demo_model, "demo")
    yield reader
    reader.reader.close()


def scrape(address: str) -> dict[tuple[str, str], float]:
    """(name, labels) -> value, by Prometheus' own parser."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_is_told_what_the_client_has_counted(counting, address):
    counting.look_up(np.random.default_rng(0), 60)
    first = scrape(address)
    hits, misses = counting.counts
    assert misses > 0 < hits
    assert first["streamd_expert_lookups_total", "result=hit,tier=host"] == hits
    assert first["streamd_expert_lookups_total", "result=miss,tier=host"] == misses
    assert first["streamd_clients", ""] == 1
    assert first["streamd_serving", ""] == 1
    assert ("streamd_evictions_total", "tier=gpu") not in first
    counting.look_up(np.random.default_rng(1), 20)
    second = scrape(address)
    grown = counting.lookup_count - hits - misses
    for result in ("hit", "miss"):
        key = "streamd_expert_lookups_total", f"result={result},tier=host"
        grown -= second[key] - first[key]
    assert grown == 0
    slab_bytes = second["streamd_disk_read_bytes_total", ""]
    assert slab_bytes >= second["streamd_disk_useful_bytes_total", ""] > 0


def dashboard_queries() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_the_dashboard_shows_what_is_there(counting, address):
    served = {name for name, _ in scrape(address)}
    shown = {name for query in dashboard_queries() for name in re.findall(r"\w+_\w+", query)}
    shown -= {"__rate_interval"}
    assert len(shown) > 15
    assert shown <= served


def test_scrapes_do_not_touch_what_people_ask_for(module_place, counting, address):
    module_place.run("streamd", "stats", "--json")
    counting.look_up(np.random.default_rng(2), 5)
    scrape(address)
    since = json.loads(module_place.run("streamd", "stats", "--json").stdout)["since_last"]
    assert since["hits"] + since["misses"] == 5 * counting.top_k


def test_a_port_that_is_taken_is_refused(module_place, daemon, demo_model, address):
    words = ("--model", demo_model, "--name", "two", "--host-cache", "6M", "--metrics", address)
    done = module_place.run("streamd", *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"cannot serve metrics at {address}" in done.stderr
    assert module_place.leftovers() == ["demo.lock", "demo.sock", "demo.zmq"]


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus here")
def test_prometheus_itself_scrapes(module_place, counting, address):
    port = free_port()
    config = module_place.directory / "prometheus.yml"
    config.write_text(
        "scrape_configs:\n- job_name: streamd\n  scrape_interval: 1s\n"
        f"  static_configs:\n  - targets: ['{address}']\n"
    )
    url = f"http://127.0.0.1:{port}/api/v1/query?query="
    with subprocess.Popen(
        ["prometheus", f"--config.file={config}", f"--web.listen-address=127.0.0.1:{port}",
         f"--storage.tsdb.path={module_place.directory / 'tsdb'}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as prometheus:  # fmt: skip

        def asked(query: str) -> list[dict]:
            with urllib.request.urlopen(url + quote(query), timeout=5) as answer:
                return json.load(answer)["data"]["result"]

        def misses_found() -> list[dict]:
            with suppress(OSError):  # it starts
                return asked(MISSES)
            return []

        try:
            (series,) = module_place.wait_until(misses_found, "prometheus has scraped")
            for query in dashboard_queries():
                # HTTPError for one that Prometheus does not understand.
                asked(query.replace("$__rate_interval", "5m").replace("$instance", ".*"))
        finally:
            prometheus.terminate()
    _, misses = counting.counts
    assert float(series["value"][1]) == misses
    assert series["metric"]["tier"] == "host"
