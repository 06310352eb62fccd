"""A prompt at any budget: each expert is read at most once a chunk; the logits stay the same."""

import numpy as np
import pytest

from infer.commands.measure import BENCH_TEXT
from infer.config import ModelConfig
from infer.session import Session
from shared.arena import PART_COUNT

TOKEN_COUNT = 150
SHARES = (0.0, 0.3, 0.6, 1.0)


@pytest.fixture(scope="module")
def reference(module_place, streaming_model):
    """Tokens, their logits and, in every chunk of 64, the experts they touch: [chunk][layer]."""
    with Session(ModelConfig(model=streaming_model, exact=True, chunk=64)) as session:
        ids = session.tokenizer.encode(BENCH_TEXT * 3)[:TOKEN_COUNT]
        chosen = {}

        def tap(name, values):
            if name.startswith("router_idx."):
                chosen.setdefault(name, []).append(np.unique(values.numpy()))

        rows = session.engine.logits(ids, tap)
    return ids, rows, chosen


def _touched_count(chosen, whole):
    """Experts that are needed, in chunks of 64 or in one go."""
    if whole:
        return sum(len(np.unique(np.concatenate(chunks))) for chunks in chosen.values())
    return sum(len(experts) for chunks in chosen.values() for experts in chunks)


@pytest.mark.parametrize("chunk", [64, None])
@pytest.mark.parametrize("share", SHARES)
def test_each_expert_is_read_once_a_chunk(share, chunk, module_place, streaming_model, reference):
    ids, rows, chosen = reference
    plan = module_place.plan(streaming_model)
    budget = max(plan["floor_bytes"], int(share * plan["full_bytes"]))
    name = f"budget-{share}-{chunk}"
    daemon = module_place.daemon(streaming_model, "--host-cache", budget, "--name", name)
    config = ModelConfig(model=streaming_model, name=name, exact=True, chunk=chunk)
    with Session(config) as session:
        before = session.engine.client.stats()
        result = session.engine.logits(ids)
        after = session.engine.client.stats()
    daemon.stop()
    read_count = (after["io"]["reads"] - before["io"]["reads"]) / PART_COUNT
    touched_count = _touched_count(chosen, whole=chunk is None)
    assert read_count <= touched_count + _unasked_count(after) - _unasked_count(before)
    if share < 1:
        assert after["tiers"]["host"]["evictions"] > 0
    np.testing.assert_allclose(result, rows, rtol=0, atol=1e-4)


def _unasked_count(stats):
    """Slabs that the idle disk brought, and those hinted that have not been used, or not yet: who
    ends in the last section leaves some without a verdict. Each is at most one read more.
    """
    host = stats["tiers"]["host"]
    hinted = host["prefetch"]
    return host["backfill"]["slabs"] + hinted["issued"] - hinted["useful"] - hinted["late"]
