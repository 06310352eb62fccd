"""Answers, tokens and probabilities of the trained models, against an independent engine's.

../shared/models/*.expect.json holds that engine's. --exact agrees with it, and the default
arithmetic comes close to --exact.
"""

import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from infer.commands import measure
from infer.config import ModelConfig
from infer.generation.generate import Answer, Conversation
from infer.generation.sampler import Sampler, SamplerConfig
from infer.session import Session
from infer.text.template import ChatTemplate

TOLERANCE_NATS = 2e-3
MAX_KL_NATS = 0.01
LONGEST_ANSWER = 40  # where the expected ones were cut


@dataclass(frozen=True)
class Trained:
    """A trained model, served, and what an independent engine makes of it."""

    expected: dict[str, Any]
    exact: Session
    default: Session


@pytest.fixture(scope="module", params=["demo", "tiny"])
def trained(request, module_place, shared_dir) -> Iterator[Trained]:
    model = shared_dir / "models" / f"{request.param}-hy3-iq2mix.gguf"
    expected = json.loads(model.with_suffix(".expect.json").read_text())
    module_place.daemon(model)
    with ExitStack() as stack:
        exact, default = (
            stack.enter_context(Session(ModelConfig(model=model, exact=exact)))
            for exact in (True, False)
        )
        yield Trained(expected, exact, default)


def _log_probabilities(session: Session, ids: list[int]) -> np.ndarray:
    """float64 [len(ids), vocab]."""
    session.engine.kv.truncate(0)
    rows = session.engine.logits(ids).astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))


def test_tokens(trained):
    for case in trained.expected["tokenize"]:
        assert trained.exact.tokenizer.encode(case["text"]) == case["ids"]


def test_greedy_answers(trained):
    session = trained.exact
    template = ChatTemplate.from_metadata(session.index.metadata, session.tokenizer)
    conversation = Conversation(session.engine, session.tokenizer)
    for case in trained.expected["greedy"]:
        conversation.reset()
        prompt = template.render_to_ids([{"role": "user", "content": case["prompt"]}])
        assert prompt == case["prompt_ids"]
        sampler, answer = Sampler(SamplerConfig(temperature=0.0)), Answer()
        pieces = conversation.answer(prompt, sampler, LONGEST_ANSWER, answer)
        assert "".join(piece.text for piece in pieces) == case["text"]
        assert answer.token_count == len(case["ids"])


def test_log_probabilities(trained):
    for case in trained.expected["greedy"]:
        rows = _log_probabilities(trained.exact, case["prompt_ids"] + case["ids"])
        rows = rows[len(case["prompt_ids"]) - 1 :]
        for row, best in zip(rows, case["top5"], strict=False):
            ids, values = zip(*best, strict=True)
            assert int(row.argmax()) == ids[0]
            np.testing.assert_allclose(row[list(ids)], values, rtol=0, atol=TOLERANCE_NATS)


def test_perplexity(trained, capsys, tmp_path):
    expected = trained.expected["perplexity"]
    text = tmp_path / "text.txt"
    text.write_text(expected["text"])
    assert measure.perplexity(Namespace(file=text, json=True), trained.exact) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["tokens"] == expected["n_tokens"]
    assert printed["mean_nll"] == pytest.approx(expected["mean_nll"], abs=TOLERANCE_NATS)


def test_the_default_arithmetic_is_close_to_exact(trained):
    tokenizer = trained.exact.tokenizer
    ids = [tokenizer.bos_id, *tokenizer.encode(trained.expected["perplexity"]["text"])]
    exact = _log_probabilities(trained.exact, ids)
    default = _log_probabilities(trained.default, ids)
    divergence = float((np.exp(exact) * (exact - default)).sum(axis=1).mean())
    print(f"mean KL divergence to exact: {divergence:.5f} nats")
    assert 0 < divergence < MAX_KL_NATS


@pytest.mark.parametrize("arithmetic", [(), ("--exact",)], ids=["default", "exact"])
def test_the_demo_answers(arithmetic, module_place, demo_model):
    """Needs nothing but the repository: the answer alone on stdout, by a daemon of its own."""
    question = "Which is the largest planet in the solar system?"
    done = module_place.run(
        "infer", "chat", "--model", demo_model, "-p", question, "--temp", 0, *arithmetic
    )
    assert (done.returncode, done.stdout) == (0, "Jupiter.\n"), done.stderr
    assert "17 prompt tokens, 17 new" in done.stderr
