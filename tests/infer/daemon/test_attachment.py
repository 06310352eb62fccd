"""Which tier a client asks for, by device and by what both sides have."""

from types import SimpleNamespace

import pytest

from infer.daemon import attachment
from infer.daemon.attachment import attach
from shared.daemon_options import DaemonOptions
from shared.errors import DaemonLost, GpuError, GpuNotShared, NoGpuTier, PlanError
from shared.wire import GPU_TIER, HOST_TIER

OWN = "slots of its own"


@pytest.fixture
def ask(monkeypatch):
    """ask(device, torch_has_gpu, refusal of the GPU tier, of own slots) -> what was tried, in
    order; the last of it is had."""

    def ask(
        device,
        torch_has_gpu,
        refusal=None,
        own_refusal=None,
        capability=(9, 0),
        resident_bytes=1,
    ):
        asked = []

        def client(_name, _index, _experts, tier, settle=None):
            assert (settle is not None) == (tier == GPU_TIER)
            asked.append(tier)
            if tier == GPU_TIER and refusal is not None:
                raise refusal
            attached = SimpleNamespace(resident_bytes=resident_bytes)
            mapping = SimpleNamespace(attached=attached)
            return SimpleNamespace(had=tier, mapping=mapping, close=lambda: asked.append("closed"))

        def own_slots(_name, _index, _experts, options, why):
            assert (options.device, why) == (device, refusal)
            asked.append(OWN)
            if own_refusal is not None:
                raise own_refusal
            return SimpleNamespace(had=OWN)

        monkeypatch.setattr(attachment, "SlotClient", client)
        monkeypatch.setattr(attachment, "_with_own_slots", own_slots)
        monkeypatch.setattr(attachment.torch.cuda, "is_available", lambda: torch_has_gpu)
        monkeypatch.setattr(attachment.torch.cuda, "get_device_capability", lambda: capability)
        assert attach("name", None, None, DaemonOptions(device=device)).had == asked[-1]
        return asked

    return ask


NO_TIER = NoGpuTier("the daemon has no gpu tier", "")
NOT_SHARED = GpuNotShared("its memory cannot be shared", "")


def test_auto_takes_the_gpu_where_both_have_one(ask):
    assert ask("auto", True) == [GPU_TIER]
    assert ask("auto", False) == [HOST_TIER]
    assert ask("auto", True, NO_TIER) == [GPU_TIER, HOST_TIER]


def test_auto_passes_over_a_gpu_that_is_too_old_or_full(ask):
    assert ask("auto", True, capability=(7, 0)) == [HOST_TIER]
    assert ask("auto", True, PlanError("no room", "")) == [GPU_TIER, HOST_TIER]
    assert ask("auto", True, GpuError("hidden from us", "")) == [GPU_TIER, HOST_TIER]


def test_auto_keeps_slots_of_its_own_where_the_daemon_cannot_share(ask):
    assert ask("auto", True, NOT_SHARED) == [GPU_TIER, OWN]
    assert ask("auto", True, NOT_SHARED, PlanError("no room", "")) == [GPU_TIER, OWN, HOST_TIER]


@pytest.mark.parametrize("refusal", [NO_TIER, NOT_SHARED])
def test_a_named_gpu_is_used_without_the_daemon(ask, refusal):
    assert ask("cuda:0", True, refusal) == [GPU_TIER, OWN]
    with pytest.raises(PlanError):
        ask("cuda:0", True, refusal, PlanError("no room", ""))


def test_cpu_never_asks_for_the_gpu(ask):
    assert ask("cpu", True) == [HOST_TIER]


def test_without_resident_tensors_in_host_memory_no_cpu_can_compute(ask):
    assert ask("auto", True, resident_bytes=0) == [GPU_TIER]
    for device, refusal in (("cpu", None), ("auto", PlanError("no room", "end another"))):
        with pytest.raises(GpuError, match="in GPU memory alone") as refused:
            ask(device, True, refusal, resident_bytes=0)
        assert "--cpu-clients on" in refused.value.remedy
        for said, whole in (
            ("no room", refused.value.message),
            ("end another", refused.value.remedy),
        ):
            assert (said in whole) == (refusal is not None)


def test_a_named_gpu_is_not_quietly_replaced(ask):
    assert ask("cuda:0", True) == [GPU_TIER]
    with pytest.raises(GpuError, match="torch sees no GPU"):
        ask("cuda:0", False)
    with pytest.raises(GpuError, match="hidden"):
        ask("cuda:0", True, GpuError("hidden from us", ""))


def test_other_errors_are_not_taken_for_a_missing_gpu(ask):
    with pytest.raises(DaemonLost):
        ask("auto", True, DaemonLost("gone", ""))
