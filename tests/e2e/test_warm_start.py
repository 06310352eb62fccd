"""A daemon that is started again fills itself with what was hot, while nobody asks for anything."""

import time

import pytest

from infer.config import ModelConfig
from infer.session import Session

QUIET_S = 2.0


@pytest.fixture
def used(place, streaming_model):
    """The model's daemon has been used and stopped; its slots in use then."""
    daemon = place.daemon(streaming_model, "--name", "warm")
    with Session(ModelConfig(model=streaming_model, name="warm")) as session:
        session.engine.logits(session.tokenizer.encode("once upon a time")[:8])
    slots_used = place.stats("warm")["tiers"]["host"]["slots_used"]
    daemon.stop()
    return slots_used


def host_of(place):
    return place.stats("warm")["tiers"]["host"]


def test_it_comes_back_warm(used, place, streaming_model):
    place.daemon(streaming_model, "--name", "warm")
    place.wait_until(
        lambda: host_of(place)["backfill"]["slabs"] >= used, "the cache is as full as it was"
    )
    host = host_of(place)
    assert host["slots_used"] == host["backfill"]["slabs"] == used
    assert host["backfill"]["bytes"] > 0
    assert host["misses"] == host["evictions"] == 0
    with Session(ModelConfig(model=streaming_model, name="warm")) as session:
        session.engine.logits(session.tokenizer.encode("once upon a time")[:8])
    assert host_of(place)["misses"] == 0


def test_not_if_it_is_told_not_to(used, place, streaming_model):
    place.daemon(streaming_model, "--name", "warm", "--warm", "off")
    time.sleep(QUIET_S)
    assert host_of(place)["slots_used"] == 0
