"""Decoding on a GPU with the compute lane: the CPU's rows, and logits close to those without."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from infer.commands.measure import BENCH_TEXT
from infer.config import LANE_AUTO, LANE_OFF, LANE_ON, ModelConfig
from infer.kernels.interface import ExpertBatch
from infer.session import Session
from shared.errors import ConfigError

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo-hy3-iq2mix.gguf"
PROMPT_COUNT, TOKEN_COUNT = 11, 71
# The GPU holds a part of the experts, the host all of them.
CONFIG = ModelConfig(model=DEMO, device="cuda:0", gpu_cache=6 << 20, host_cache=64 << 20, ctx=512)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def decoded(session: Session) -> list[int]:
    """Tokens of a text in the model's language, given one at a time."""
    return session.tokenizer.encode(BENCH_TEXT)[PROMPT_COUNT:TOKEN_COUNT]


def logits_of(session: Session) -> np.ndarray:
    engine = session.engine
    engine.kv.truncate(0)
    engine.extend(session.tokenizer.encode(BENCH_TEXT)[:PROMPT_COUNT])
    return np.stack([engine.extend([token]) for token in decoded(session)])


def compute_all(session: Session) -> None:
    """The CPU gets whatever the policy may give it."""
    for layer in session.engine.model.layers:
        if hasattr(layer.ffn, "router"):
            policy = session.engine.lane.policy(layer.ffn.layer)
            policy.share = lambda host_count, disk_count: (host_count, disk_count > 0)


@pytest.fixture(scope="module")
def without() -> np.ndarray:
    with Session(replace(CONFIG, compute_lane=LANE_OFF)) as session:
        assert session.engine.lane is None
        logits_of(session)
        return logits_of(session)


def divergence(of: np.ndarray, to: np.ndarray) -> float:
    """Mean KL, nats."""
    p, q = (torch.log_softmax(torch.from_numpy(rows).double(), -1) for rows in (of, to))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.fixture(scope="module")
def exact() -> np.ndarray:
    with Session(replace(CONFIG, exact=True)) as session:
        return logits_of(session)


@pytest.mark.parametrize("everything", [False, True])
def test_logits_are_as_close_to_exact_ones_as_without(exact, without, everything):
    with Session(replace(CONFIG, compute_lane=LANE_ON)) as session:
        if everything:
            compute_all(session)
        logits_of(session)  # fills the host tier
        before = replace(session.engine.lane.counters)
        rows = logits_of(session)
        computed = session.engine.lane.values(before)["computed"]
    assert computed > (TOKEN_COUNT if everything else 0)
    assert divergence(exact, without) < 0.01
    assert divergence(exact, rows) < 0.01
    assert divergence(without, rows) < 0.01
    assert (without.argmax(-1) == rows.argmax(-1)).mean() >= 0.85


def test_rows_are_those_of_the_cpus_kernels_and_reach_the_gpu():
    """Each row that the lane hands over, computed once more from the file's own bytes, and looked
    for on the GPU when the next router has answered."""
    file = np.memmap(DEMO, np.uint8, mode="r")
    with Session(replace(CONFIG, compute_lane=LANE_ON)) as session:
        engine, lane, graphs = session.engine, session.engine.lane, session.engine.graphs
        compute_all(session)
        logits_of(session)
        compute, bring = lane.compute, graphs._missing.bring
        handed_over = []  # rows of the layer before
        counts = [0, 0]

        def computing(shape, ranks, meanwhile):
            layer, experts = lane._section.layer, lane._section.experts
            x = graphs._buffers.normed.cpu()
            assert torch.equal(lane.x, x), "the CPU's input is the GPU's"
            assert compute(shape, ranks, meanwhile)
            extents = [engine.client.experts.extents(layer, int(expert)) for expert in experts]
            slabs = [[file[e.offset : e.offset + e.length].copy() for e in own] for own in extents]
            parts = [np.array([s[part].ctypes.data for s in slabs]) for part in range(3)]
            batch = ExpertBatch(
                shape, ranks.astype(np.int32), np.arange(len(ranks) + 1, dtype=np.int32), *parts
            )
            rows = torch.zeros_like(lane.rows)
            lane._kernels.experts(x, batch, rows)
            assert torch.equal(lane.rows[0, ranks], rows[0, ranks])
            handed_over.append((ranks, rows[0, ranks]))
            counts[0] += 1
            return True

        def bringing(index, *arguments):
            for ranks, rows in handed_over:
                assert torch.equal(graphs._buffers.rows[0].cpu()[ranks], rows)
                counts[1] += 1
            handed_over.clear()
            bring(index, *arguments)

        def answering(index, answer=graphs._answers.answer):
            missing_count = answer(index)
            if missing_count == 0:
                handed_over.clear()  # the next rows will be of another layer
            return missing_count

        lane.compute, graphs._missing.bring = computing, bringing
        graphs._answers.answer = answering
        for token in decoded(session):
            engine.extend([token])
            handed_over.clear()
    assert min(counts) > 20, counts


def test_a_trial_begins_without_and_ends_with_a_verdict(without):
    with Session(replace(CONFIG, compute_lane=LANE_AUTO)) as session:
        lane = session.engine.lane
        assert not lane.is_on
        rows = logits_of(session)
        logits_of(session)
    # Its first tokens are before the trial: the bits of without.
    assert np.array_equal(rows[:20], without[:20])
    assert lane.counters.computed > 0


@pytest.mark.parametrize(
    ("changed", "word"),
    [({"exact": True}, "--exact"), ({"device": "cpu", "gpu_cache": None}, "cpu")],
)
def test_what_cannot_be_is_said(changed, word):
    with (
        pytest.raises(ConfigError, match=word),
        Session(replace(CONFIG, compute_lane=LANE_ON, **changed)),
    ):
        pass
