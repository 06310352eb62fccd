"""Which tier a client asks for, by device and by what both sides have."""

import pytest

from infer.daemon import attachment
from infer.daemon.attachment import attach
from shared.errors import DaemonLost, GpuError, PlanError
from shared.wire import GPU_TIER, HOST_TIER


@pytest.fixture
def ask(monkeypatch):
    """ask(device, torch_has_gpu, refusal of the GPU tier) -> the tiers asked for, in order."""

    def ask(device, torch_has_gpu, refusal=None, capability=(9, 0)):
        asked = []

        def client(_name, _index, _experts, tier, settle=None):
            assert (settle is not None) == (tier == GPU_TIER)
            asked.append(tier)
            if tier == GPU_TIER and refusal is not None:
                raise refusal
            return tier

        monkeypatch.setattr(attachment, "SlotClient", client)
        monkeypatch.setattr(attachment.torch.cuda, "is_available", lambda: torch_has_gpu)
        monkeypatch.setattr(attachment.torch.cuda, "get_device_capability", lambda: capability)
        assert attach("name", None, None, device) == asked[-1]
        return asked

    return ask


def test_auto_takes_the_gpu_where_both_have_one(ask):
    assert ask("auto", True) == [GPU_TIER]
    assert ask("auto", False) == [HOST_TIER]
    assert ask("auto", True, GpuError("the daemon has no GPU tier", "")) == [GPU_TIER, HOST_TIER]


def test_auto_passes_over_a_gpu_that_is_too_old_or_full(ask):
    assert ask("auto", True, capability=(7, 0)) == [HOST_TIER]
    assert ask("auto", True, PlanError("no room", "")) == [GPU_TIER, HOST_TIER]


def test_cpu_never_asks_for_the_gpu(ask):
    assert ask("cpu", True) == [HOST_TIER]


def test_a_named_gpu_is_not_quietly_replaced(ask):
    assert ask("cuda:0", True) == [GPU_TIER]
    with pytest.raises(GpuError, match="torch sees no GPU"):
        ask("cuda:0", False)
    with pytest.raises(GpuError, match="no GPU tier"):
        ask("cuda:0", True, GpuError("the daemon has no GPU tier", ""))


def test_other_errors_are_not_taken_for_a_missing_gpu(ask):
    with pytest.raises(DaemonLost):
        ask("auto", True, DaemonLost("gone", ""))
