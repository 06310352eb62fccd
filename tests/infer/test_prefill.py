"""A prompt computed at once and token by token: the same logits, whatever its length, in whatever
waves its experts come. One run token by token serves all lengths, whose prompts it begins with."""

import gguf_glm
import numpy as np
import pytest

from infer.kernels.ggml_cpu import GgmlKernels

LENGTHS = (1, 2, 7, 33, 129)
LONG_LENGTHS = (600, 2047)
STEPS = 8
TOLERANCE = 1e-4
TOP_K = 2  # of both families' small models
FLOOR = TOP_K


@pytest.fixture(scope="module", params=["hy3", "glm"])
def path(request, gguf_factory, tmp_path_factory):
    model = {"hy3": gguf_factory.hy3_model, "glm": gguf_glm.glm_model}[request.param]()
    return model.write(tmp_path_factory.mktemp(request.param) / "model.gguf")


def _ids(count):
    return np.random.default_rng(7).integers(0, 256, count).tolist()


@pytest.fixture(scope="module")
def stepped(path, local_model):
    """Logits [n, vocab] of the longest prompt, a token at a time."""
    count = LENGTHS[-1]
    return local_model(path, GgmlKernels, context=count, chunk=1).logits(_ids(count))


def _at_once(path, local_model, count, wave_experts):
    model = local_model(path, GgmlKernels, context=count, chunk=count, wave_experts=wave_experts)
    return model.logits(_ids(count))


@pytest.mark.parametrize("wave_experts", [FLOOR, 3, 8])
@pytest.mark.parametrize("count", LENGTHS)
def test_at_once_is_token_by_token(count, wave_experts, path, local_model, stepped):
    rows = _at_once(path, local_model, count, wave_experts)
    np.testing.assert_allclose(rows, stepped[:count], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("count", LONG_LENGTHS)
def test_the_end_of_a_long_prompt_too(count, path, local_model):
    """Its last tokens one by one behind the rest, and all at once."""
    model = local_model(path, GgmlKernels, context=count, chunk=count)
    model.extend(_ids(count)[:-STEPS])
    stepped = [model.extend([token]) for token in _ids(count)[-STEPS:]]
    rows = _at_once(path, local_model, count, FLOOR)[-STEPS:]
    np.testing.assert_allclose(rows, stepped, rtol=0, atol=TOLERANCE)


def test_a_tail_of_one_token_takes_the_same_way(path, local_model, stepped):
    """Chunks of 32 of 33 tokens."""
    model = local_model(path, GgmlKernels, context=64, chunk=32, wave_experts=FLOOR)
    np.testing.assert_allclose(model.logits(_ids(33)), stepped[:33], rtol=0, atol=TOLERANCE)
