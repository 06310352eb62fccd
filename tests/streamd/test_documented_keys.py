"""Every key that programs may read of the daemon and of the plan is in the documentation."""

import os
import re
from pathlib import Path

import pytest

from shared.io_choice import Rate
from shared.runtime_dir import Endpoints
from shared.wire import HOST_TIER, Attach
from streamd.config import StreamdConfig
from streamd.daemon import Daemon
from streamd.planning.model_plan import plan_model
from streamd.planning.plan_options import MachineOptions
from streamd.planning.plan_view import plan_values

PROJECT_DIR = Path(__file__).resolve().parents[2]
NAME = "documented"


@pytest.fixture(scope="module")
def documented():
    """By command, the words that the tables have in code."""
    text = (PROJECT_DIR / "docs" / "running.md").read_text()
    section = text.split("\n## For programs\n")[1].split("\n## ")[0]
    stats, plan = section.split("`streamd plan --json`")
    return {name: set(re.findall(r"`(\w+)`", part)) for name, part in (("s", stats), ("p", plan))}


@pytest.fixture
def daemon(demo_model, tmp_path_factory, monkeypatch):
    """One with a client; its loop does not run."""
    directory = tmp_path_factory.mktemp("run", numbered=True)
    directory.chmod(0o700)
    for name in ("STREAMD_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(directory))
    trace = directory / "t.trace"
    config = StreamdConfig(model=demo_model, name=NAME, gpu_cache=0, trace=trace)
    with Daemon(config, Endpoints.of(NAME)) as running:
        shards = [list(shard) for shard in running.model.index.fingerprints]
        attached, _ = running.attach(Attach(os.getpid(), shards, HOST_TIER))
        yield running
        running.detach(attached.ticket)


def keys_of(values):
    if isinstance(values, list):
        return set().union(*map(keys_of, values))
    if not isinstance(values, dict):
        return set()
    return values.keys() | keys_of(list(values.values()))


def test_statistics(daemon, documented):
    values = daemon.stats()
    assert values["clients"]
    assert values["trace"]
    assert keys_of(values) <= documented["s"]


def test_both_tiers_have_the_same_keys_and_a_gpu_some_besides(daemon):
    host, gpu = (daemon.stats()["tiers"][name].keys() for name in ("host", "gpu"))
    assert host < gpu


def test_the_plan(demo_model, documented, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rate = Rate(1e9)
    config = StreamdConfig(model=demo_model, vram=8 << 30)
    machine = MachineOptions(ram=16 << 30, disk=rate, pcie=rate, bandwidth=rate)
    values = plan_values(plan_model(config, machine))
    assert values["gpu"] is not None
    assert keys_of(values) <= documented["p"]
