"""The engine lets go of the lane's attachment with all else that lies in the daemon's memory."""

from types import SimpleNamespace

import torch

from infer.engine import Engine


def engine_with_lane(log: list) -> Engine:
    engine = Engine.__new__(Engine)
    engine.device = torch.device("cpu")
    engine.client = SimpleNamespace(close=lambda: log.append("client"))
    engine.lane = SimpleNamespace(close=lambda: log.append("lane"))
    engine.model = engine.graphs = object()
    return engine


def test_a_lost_daemons_host_slots_are_let_go_of():
    log: list = []
    engine = engine_with_lane(log)
    engine._unbind()
    engine._unbind()  # the loss may be noticed by two
    assert log == ["lane"]
    assert engine.lane is None
    assert not hasattr(engine, "model")


def test_both_attachments_are_closed_once():
    log: list = []
    engine = engine_with_lane(log)
    engine.close()
    assert log == ["lane", "client"]
    engine.close()
    assert log == ["lane", "client", "client"]
