"""Whether a GPU tier is wanted, and which."""

from dataclasses import replace

import pytest
from fake_gpu import FakeDevice
from gpu_bench import some_experts

from shared.daemon_options import DaemonOptions, parse_device
from shared.errors import ConfigError, GpuError, GpuNotShared
from shared.layer_choice import Residents
from streamd.tiers.gpu_tier import open_gpu


@pytest.mark.parametrize(("text", "device"), [("cuda:03", "cuda:3"), ("cpu", "cpu")])
def test_devices(text, device):
    assert parse_device(text) == device


@pytest.mark.parametrize("text", ["cuda", "cuda:", "cuda:-1", "cuda:1000", "gpu", "3", ""])
def test_what_is_no_device(text):
    with pytest.raises(ValueError, match="cuda:0"):
        parse_device(text)


@pytest.mark.parametrize(
    ("given", "wanted", "ordinal"),
    [
        ({}, None, 0),
        ({"gpu_cache": 0}, False, 0),
        ({"device": "cpu"}, False, 0),
        ({"device": "cpu", "gpu_cache": 0}, False, 0),
        ({"device": "cuda:2"}, True, 2),
        ({"device": "cuda:2", "gpu_cache": 0}, False, 2),
        ({"gpu_cache": 1 << 30}, True, 0),
    ],
)
def test_what_is_wanted(given, wanted, ordinal):
    options = DaemonOptions(**given)
    assert (options.wants_gpu, options.gpu_ordinal) == (wanted, ordinal)


def test_a_gpu_cache_on_the_cpu_is_refused():
    with pytest.raises(ConfigError, match="--gpu-cache"):
        DaemonOptions(device="cpu", gpu_cache=1 << 30)


def test_what_is_given_reaches_the_daemon_that_infer_starts():
    options = replace(DaemonOptions(), device="cuda:1", gpu_reserve=5)
    assert options.arguments() == ["--gpu-reserve", "5", "--device", "cuda:1"]


def no_gpu(ordinal):
    raise GpuError("there is no NVIDIA driver")


def open_with(wanted, open_device):
    return open_gpu(some_experts(), Residents(1000), wanted, 1, None, 0, open_device)


def test_no_gpu_is_looked_for_where_none_is_wanted():
    assert open_with(False, no_gpu) is None


def test_auto_does_without_and_says_why(caplog):
    caplog.set_level("DEBUG")
    assert open_with(None, no_gpu) is None
    assert "there is no NVIDIA driver" in caplog.text
    assert {record.levelname for record in caplog.records} == {"DEBUG"}


def test_a_wanted_one_that_is_not_there_is_an_error():
    with pytest.raises(GpuError):
        open_with(True, no_gpu)


@pytest.mark.parametrize("wanted", [None, True])
def test_one_that_cannot_be_shared_is_told_of_whether_wanted_or_not(wanted):
    def not_shared(ordinal):
        raise GpuNotShared("its memory cannot be shared")

    with pytest.raises(GpuNotShared):
        open_with(wanted, not_shared)
    assert open_with(False, not_shared) is None


def test_the_device_that_is_named_is_opened():
    device, plan = open_with(True, FakeDevice)
    assert device.ordinal == 1
    assert plan.layout.slot_count == 128
