"""The client's share of GPU memory, against what the families themselves would allocate."""

import pytest
from gguf_factory import hy3_model
from gguf_glm import glm_model

from infer.chunks import activation_bytes, chunk_within
from infer.families import family_of
from shared.client_memory import (
    FIXED_BYTES,
    PLANNED_CHUNK,
    cache_token_values,
    check_context,
    client_bytes,
    planned_context,
)
from shared.errors import ConfigError
from shared.gguf_index import GgufIndex


@pytest.fixture(params=[hy3_model, glm_model], ids=["hy3", "glm"])
def index(request, tmp_path):
    path = tmp_path / "model.gguf"
    request.param().write(path)
    return GgufIndex.open(path)


def needed(index, context, chunk):
    """By the shapes that the client itself computes with."""
    shape = family_of(index).read_shape(index)
    token_bytes = activation_bytes(shape, index.arch_key("expert_used_count", int))
    return 2 * shape.cache.token_values * context + token_bytes * chunk + FIXED_BYTES


def test_what_the_cache_keeps_of_a_token(index):
    assert cache_token_values(index) == family_of(index).read_shape(index).cache.token_values


@pytest.mark.parametrize(("context", "chunk"), [(1000, 10), (1000, 1000), (5000, None)])
def test_what_a_client_is_left_is_what_it_needs(index, context, chunk):
    chunk_tokens = chunk or min(context, PLANNED_CHUNK)
    assert client_bytes(index, context, chunk) == needed(index, context, chunk_tokens)


def test_a_chunk_is_no_longer_than_the_context(index):
    assert client_bytes(index, 100, 5000) == client_bytes(index, 100, 100)


def test_the_context_that_is_planned_for(index):
    longest = index.arch_key("context_length", int)
    assert planned_context(index, 0) == min(4096, longest)
    assert planned_context(index, 17) == 17
    check_context(index, longest)
    with pytest.raises(ConfigError, match=f"--ctx {longest + 1} is more than .* {longest}"):
        check_context(index, longest + 1)


def test_the_client_chooses_the_chunk_that_was_planned_for(index):
    shape = family_of(index).read_shape(index)
    token_bytes = activation_bytes(shape, index.arch_key("expert_used_count", int))
    cache_bytes = 2 * shape.cache.token_values * 3000
    left_bytes = client_bytes(index, 3000, 700)
    assert chunk_within(token_bytes, left_bytes, cache_bytes, 3000) == 700
    assert chunk_within(token_bytes, left_bytes, cache_bytes, 500) == 500
    assert chunk_within(token_bytes, cache_bytes, cache_bytes, 3000) == 0
