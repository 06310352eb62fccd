"""Where there is a compute lane, where not, and where it is refused."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from infer.config import LANE_AUTO, LANE_OFF, LANE_ON, ModelConfig
from infer.daemon.waits import Waits
from infer.kernels.scratch import KernelBounds
from infer.lane import open_lane as module
from infer.lane.open_lane import open_lane
from infer.uploads.client import UploadingClient
from shared.errors import ConfigError, DaemonLost, PlanError
from shared.wire import HOST_TIER

BOUNDS = KernelBounds(1, 256, 256, 2, 4, 1, 64, 1)
GPU, CPU = torch.device("cuda:0"), torch.device("cpu")
EXPERTS = SimpleNamespace(top_k=2, classes=(), layer_class=np.zeros(1, np.int32))


@pytest.fixture
def ask(monkeypatch):
    """ask(when, device, ...) -> the lane; what was asked of the daemon is in `ask.attached`."""

    def ask(when, device=GPU, exact=False, recordable=True, refusal=None, own_slots=False):
        def client(*arguments):
            ask.attached.append(arguments)
            if refusal is not None:
                raise refusal
            return SimpleNamespace(experts=EXPERTS)

        def lane(host, kernels, width, trial, pinned):
            assert (width, pinned) == (256, True)
            return SimpleNamespace(host=host, trial=trial, threads=kernels.threads)

        monkeypatch.setattr(module, "SlotClient", client)
        monkeypatch.setattr(module, "ComputeLane", lane)
        config = replace(ModelConfig(), compute_lane=when, exact=exact, threads=3)
        model = SimpleNamespace(shape=SimpleNamespace(width=256), recordable=recordable)
        gpu = UploadingClient.__new__(UploadingClient) if own_slots else ask.gpu
        return open_lane("name", gpu, "index", EXPERTS, model, BOUNDS, config, device)

    ask.attached, ask.gpu = [], SimpleNamespace(waits=Waits())
    return ask


def test_off_is_the_default_and_asks_for_nothing(ask):
    assert ModelConfig().compute_lane == LANE_OFF
    assert ask(LANE_OFF) is None
    assert not ask.attached


def test_on_is_on_and_auto_tries(ask):
    lane = ask(LANE_ON)
    assert lane.trial is None
    assert lane.threads == 3
    assert lane.host.waits is ask.gpu.waits
    assert ask(LANE_AUTO).trial.on is False
    assert ask.attached == [("name", "index", EXPERTS, HOST_TIER)] * 2


@pytest.mark.parametrize(
    ("world", "word"),
    [
        ({"device": CPU}, "cpu"),
        ({"exact": True}, "--exact"),
        ({"recordable": False}, "not recorded"),
        ({"own_slots": True}, "cannot share"),
        ({"refusal": PlanError("no room", "a larger --host-cache")}, "--host-cache"),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_demanded(ask, world, word):
    with pytest.raises(ConfigError, match=word):
        ask(LANE_ON, **world)
    assert ask(LANE_AUTO, **world) is None


def test_other_errors_are_no_missing_lane(ask):
    with pytest.raises(DaemonLost):
        ask(LANE_AUTO, refusal=DaemonLost("gone"))
