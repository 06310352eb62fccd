"""streamd --trace: what routers chose, of every client, comes out in the file."""

import json

import numpy as np
import pytest
from replay_traces import load_trace

from infer.config import ModelConfig
from infer.session import Session

PROMPT_COUNT, TOKEN_COUNT = 6, 10


@pytest.fixture
def traced(place, streaming_model):
    """A trace of a short prompt and a few tokens, of two clients one after the other."""
    path = place.directory / "choices.trace"
    daemon = place.daemon(streaming_model, "--name", "traced", "--trace", path)
    for _ in range(2):
        with Session(ModelConfig(model=streaming_model, name="traced")) as session:
            ids = session.tokenizer.encode("there was a fox who ate a grape and slept")
            session.engine.logits(ids[:PROMPT_COUNT])
            for token in ids[PROMPT_COUNT:TOKEN_COUNT]:
                session.engine.logits([token])
    values = place.stats("traced")["trace"]
    daemon.stop()
    return path, values


def test_every_layer_of_every_token_is_there(traced):
    path, values = traced
    header = json.loads(path.read_bytes().partition(b"\n")[0])
    trace = load_trace(path)
    moe_count = sum(size > 0 for size in header["layer_bytes"])
    decode = [keys for is_decode, keys in trace.groups if is_decode]
    assert len(decode) == 2 * (TOKEN_COUNT - PROMPT_COUNT) * moe_count
    assert {len(keys) for keys in decode} == {header["top_k"]}
    layers = np.array(decode)[:, 0] // trace.n_experts
    assert layers[:moe_count].tolist() == sorted(layers[:moe_count].tolist())
    first, second = decode[: len(decode) // 2], decode[len(decode) // 2 :]
    assert first == second, "both did the same"
    assert values["lost"] == 0
