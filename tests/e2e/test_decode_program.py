"""Recorded steps of the trained models: the bits of the model's own forward pass, and its reads."""

import numpy as np
import pytest
import torch

from infer.config import ModelConfig
from infer.recorded.decode_program import DecodeProgram
from infer.session import Session

PROMPT = [5, 17, 200, 31, 8, 99]
STEP_COUNT = 40
CONTEXT = 600


def _forward(session, ids):
    """Logits [n, vocab] of the tokens one by one, without recorded jobs."""
    engine = session.engine
    with torch.inference_mode():
        return [
            engine.model.forward(torch.tensor([token]), engine.kv, False, True).numpy()[0].copy()
            for token in ids
        ]


def _steps(session, ids):
    return [session.engine.extend([token]) for token in ids]


def _compare(session, prompt_count, step_count):
    """Both ways from the same place; the bits must be equal."""
    engine = session.engine
    ids = np.random.default_rng(3).integers(0, engine.shape.vocab_size, step_count).tolist()
    engine.kv.truncate(0)
    engine.extend((PROMPT * 200)[:prompt_count])
    expected = _forward(session, ids)
    engine.kv.truncate(prompt_count)
    rows = _steps(session, ids)
    assert engine.kv.length == prompt_count + step_count
    np.testing.assert_array_equal(rows, expected)


@pytest.fixture(scope="module", params=["demo", "tiny"])
def path(request, shared_dir):
    return shared_dir / "models" / f"{request.param}-hy3-iq2mix.gguf"


@pytest.fixture(scope="module")
def session(module_place, path):
    module_place.daemon(path)
    with Session(ModelConfig(model=path, ctx=CONTEXT)) as session:
        assert isinstance(session.engine.graphs, DecodeProgram)
        yield session


@pytest.mark.parametrize("prompt_count", [1, 6, 250, 510])
def test_same_bits_at_any_place(session, prompt_count):
    """Attention is cut at every 256 positions."""
    _compare(session, prompt_count, STEP_COUNT)


def test_a_step_at_the_very_beginning(session):
    engine = session.engine
    engine.kv.truncate(0)
    expected = _forward(session, [7])
    engine.kv.truncate(0)
    np.testing.assert_array_equal(_steps(session, [7]), expected)


def test_exact_steps_are_not_recorded(module_place, path):
    with Session(ModelConfig(model=path, exact=True)) as session:
        assert session.engine.graphs is None


def test_counts_what_it_looks_up(session):
    engine = session.engine
    before = sum(engine.client.lookups)
    engine.extend([1])
    routers = sum(hasattr(layer.ffn, "router") for layer in engine.model.layers)
    top_k = engine.client.experts.top_k
    assert sum(engine.client.lookups) - before == routers * top_k
    assert set(engine.graphs.spent_s) >= {"attention", "router", "experts", "shared expert"}


@pytest.mark.parametrize("prefetch", ["off", "auto", "2"])
def test_same_bits_while_experts_are_missing(prefetch, module_place, path):
    """With a cache at the floor some of almost every layer's have to be read."""
    floor_bytes = module_place.plan(path)["floor_bytes"]
    daemon = module_place.daemon(path, "--host-cache", floor_bytes, "--name", f"floor-{prefetch}")
    config = ModelConfig(model=path, name=daemon.name, prefetch=prefetch, ctx=CONTEXT)
    with Session(config) as session:
        _compare(session, 6, STEP_COUNT)
        hits, misses = session.engine.client.lookups
        assert misses > hits / 4
    daemon.stop()
