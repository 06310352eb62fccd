"""How many tokens at once: bounds, and figures of the real models."""

import dataclasses

import pytest
import torch

from infer.caches.kv_cache import KvShape
from infer.chunks import (
    MAX_ACTIVATION_BYTES,
    MAX_CHUNK,
    MIN_CHUNK,
    activation_bytes,
    choose_chunk,
    free_memory_bytes,
    logits_chunk,
)
from infer.config import ModelConfig
from infer.kernels.scratch import LatentBounds
from infer.model import ModelShape
from shared.errors import ConfigError
from shared.options import build

GIB = 1 << 30
HY3 = ModelShape(80, 4096, 120832, 262144, 64, 8, 128, 1e-5, KvShape(80, 8, 128))
GLM = dataclasses.replace(
    HY3, width=6144, heads=64, kv_heads=1, latent=LatentBounds(64, 576, 512, 32, 128, 2048)
)


def test_figures_of_the_real_models():
    assert 3e5 < activation_bytes(HY3, 8) < 4e5
    assert 5e5 < activation_bytes(GLM, 8) < 1e6
    # A desktop with 8 GiB left to everything but the daemon, and one with little.
    assert choose_chunk(activation_bytes(HY3, 8), 8 * GIB, 131072) > 2500
    assert choose_chunk(activation_bytes(HY3, 8), 1 * GIB, 131072) == 390


@pytest.mark.parametrize("free_bytes", [0, 1 << 20, GIB, 64 * GIB, 1 << 50])
@pytest.mark.parametrize("context", [16, 4096, 131072])
def test_bounds(free_bytes, context):
    token_bytes = activation_bytes(HY3, 8)
    chunk = choose_chunk(token_bytes, free_bytes, context)
    assert 1 <= chunk <= min(context, MAX_CHUNK)
    assert chunk >= min(context, MIN_CHUNK)
    if chunk > MIN_CHUNK:
        assert chunk * token_bytes <= min(MAX_ACTIVATION_BYTES, free_bytes / 8)


def test_where_all_logits_are_wanted_they_are_what_counts():
    assert logits_chunk(4096, 120832) == 555
    assert logits_chunk(100, 120832) == 100
    assert logits_chunk(4096, 1 << 40) == 1


def test_the_memory_of_a_cpu_is_the_machines():
    assert free_memory_bytes(torch.device("cpu")) > 0


def test_the_option():
    def chunk(text):
        return build(ModelConfig, [("command line", {"chunk": text})]).chunk

    assert chunk("auto") is None
    assert chunk("17") == 17
    for text in ("0", "-1", "all"):
        with pytest.raises(ConfigError, match="--chunk cannot be"):
            chunk(text)
