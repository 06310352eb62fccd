"""From `--device` to a client with slots of its own, over a real daemon's refusal."""

import pytest
from fake_upload_device import FakeUploadDevice
from uploading_bench import NAME, daemon, least_cache

import infer.uploads.cuda_device as cuda_device
from infer.config import ModelConfig
from infer.daemon import attachment
from infer.daemon.client import SlotClient
from infer.session import Session
from infer.uploads.client import UploadingClient
from shared.errors import PlanError


class FoundDevice(FakeUploadDevice):
    ordinals = ()

    def __init__(self, ordinal):
        super().__init__()
        FoundDevice.ordinals += (ordinal,)

    def free_bytes(self):
        return 8 << 30


@pytest.fixture(autouse=True)
def _a_gpu_is_there(place, monkeypatch):
    monkeypatch.setattr(attachment.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attachment.torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(cuda_device, "CudaUploadDevice", FoundDevice)
    monkeypatch.setattr(FoundDevice, "ordinals", ())


def open_session(model, **options):
    return Session(ModelConfig(model=model, name=NAME, ctx=256, threads=2, **options))


@pytest.mark.parametrize("device", ["auto", "cuda:2"])
def test_where_the_daemon_cannot_share(demo_model, device, capsys, caplog):
    options = {"gpu_cache": least_cache(demo_model), "host_cache": 1 << 30, "device": device}
    with daemon(demo_model), open_session(demo_model, **options) as session:
        client = session.engine.client
        assert isinstance(client, UploadingClient)
        assert FoundDevice.ordinals == (0 if device == "auto" else 2,)
        assert client.cache.classes[0].count < 80, "the cache is as large as --gpu-cache says"
        session.engine.extend([5, 6, 7])
        assert client.lookups[1] > 0
    assert "GPU 0 cannot share its memory between processes here: infer keeps 6." in caplog.text
    assert "runs already: --host-cache changes nothing" in capsys.readouterr().err


def test_where_the_daemon_was_told_to_do_without(demo_model, caplog):
    with daemon(demo_model, gpu_cache=0):
        with open_session(demo_model, device="cuda:0") as session:
            assert session.engine.has_own_slots
            assert session.engine.client.cache.classes[0].holds_all
        assert "the daemon has no gpu tier: infer keeps" in caplog.text
        with open_session(demo_model, device="auto") as session:
            assert isinstance(session.engine.client, SlotClient)
        assert len(FoundDevice.ordinals) == 1


def test_own_slots_that_are_too_few_are_refused_or_done_without(demo_model):
    with daemon(demo_model):
        with (
            pytest.raises(PlanError, match="at least"),
            open_session(demo_model, device="cuda:0", gpu_cache=1 << 20),
        ):
            pass
        with open_session(demo_model, device="auto", gpu_cache=1 << 20) as session:
            assert isinstance(session.engine.client, SlotClient)
