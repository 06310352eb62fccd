"""Guesses of what routers choose: their arithmetic, and how good they are on a trained model."""

import ctypes

import numpy as np
import pytest
import torch

from infer.ahead.predict import MAX_TOKENS, Correction, Predictor
from infer.blocks.moe import MoeFfn
from infer.kernels.ggml_cpu import GgmlKernels
from shared.quants import TensorType

CANDIDATES = 6


class Listener:
    """Asks for everything up to `depth` layers ahead, and keeps what it hears."""

    def __init__(self, layers, depth=1):
        self.layers, self.depth = layers, depth
        self.candidate_count = CANDIDATES
        self.guesses, self.choices, self.pauses = [], [], 0

    def pause(self):
        self.pauses += 1

    def targets(self, layer):
        return list(enumerate([n for n in self.layers if n > layer][: self.depth], 1))

    def chosen(self, layer, experts):
        self.choices.append((layer, experts))

    def forecast(self, forecasts):
        self.guesses += forecasts.items()


def _attach(local, **options):
    layers = local.model.layers
    numbers = [n for n, layer in enumerate(layers) if isinstance(layer.ffn, MoeFfn)]
    listener = Listener(numbers, **options)
    local.model.foresight = Predictor(local.kernels, local.shape.eps, layers, listener)
    return listener


def _local(local_model, path, **options):
    made = []

    def kernels_of(bounds):
        made.append(GgmlKernels(bounds))
        return made[0]

    local = local_model(path, kernels_of, exact=False, **options)
    local.kernels = made[0]
    return local


@pytest.fixture
def trained(local_model, demo_model):
    return _local(local_model, demo_model, chunk=1)


def test_a_guess_is_the_next_router_applied_to_the_present_residual(trained):
    """Recomputed in float64 from what `tap` shows: residual, norm, router, sigmoid and bias."""
    listener = _attach(trained, depth=3)
    taken = {}
    trained.logits([5], lambda name, values: taken.setdefault(name, values.double()))
    layers = trained.model.layers
    guesses = {}
    for (distance, layer), ranked in listener.guesses:
        guesses[layer - distance, layer] = ranked
    assert {layer - at for at, layer in guesses} == {1, 2, 3}
    for (at, layer), ranked in guesses.items():
        residual = taken[f"hidden.{at}"] + taken[f"attn_out.{at}"]
        scale = (residual.pow(2).mean(-1, keepdim=True) + trained.shape.eps).rsqrt()
        normed = residual * scale * layers[layer].ffn_norm.double()
        ffn = layers[layer].ffn
        router = _floats(ffn.router.matrices[0])
        likely = torch.sigmoid(normed @ router.T)[0] + ffn.bias.double()
        np.testing.assert_array_equal(ranked, likely.argsort(descending=True)[:CANDIDATES])


def _floats(matrix):
    """A float32 matrix [rows, columns], in float64."""
    assert matrix.type_id == TensorType.F32
    source = (ctypes.c_float * (matrix.rows * matrix.columns)).from_address(matrix.address)
    return torch.tensor(np.frombuffer(source, np.float32)).view(matrix.rows, -1).double()


def test_choices_are_those_of_the_router(trained):
    listener = _attach(trained)
    taken = {}
    trained.logits([5], taken.setdefault)
    for layer, experts in listener.choices:
        assert sorted(taken[f"router_idx.{layer}"][0].tolist()) == sorted(experts)
    assert [layer for layer, _ in listener.choices] == listener.layers


def test_most_choices_of_a_trained_model_are_foreseen(trained):
    """Four of sixteen by chance are a quarter; the plain gate has 0.6 and more here."""
    listener = _attach(trained)
    rng = np.random.default_rng(2)
    trained.logits(rng.integers(100, 4000, 24).tolist())
    choices = iter(listener.choices)
    hits = [
        np.isin(experts, ranked[:4]).mean()
        for ((_, layer), ranked), (chosen_layer, experts) in zip(
            listener.guesses, choices, strict=True
        )
        if layer == chosen_layer
    ]
    assert len(hits) == 24 * len(listener.layers)
    assert np.mean(hits) > 0.5


def test_logits_have_the_same_bits_with_it(trained):
    ids = [5, 17, 300, 9]
    plain = trained.logits(ids)
    trained.kv.truncate(0)
    _attach(trained, depth=3)
    np.testing.assert_array_equal(trained.logits(ids), plain)


def test_long_chunks_are_left_alone(local_model, demo_model):
    local = _local(local_model, demo_model)
    listener = _attach(local)
    local.logits(list(range(100, 100 + MAX_TOKENS + 1)))
    assert not listener.guesses
    assert listener.pauses == len(local.model.layers)
    local.logits(list(range(100, 100 + MAX_TOKENS)))
    assert listener.guesses


# What the plain gate errs by


def _scores(rng, n_experts=16):
    return rng.normal(size=n_experts).astype(np.float32)


def test_a_correction_begins_as_nothing():
    scores = _scores(np.random.default_rng(0))[np.newaxis]
    np.testing.assert_array_equal(Correction(16).apply(scores), scores)


def test_a_correction_learns_a_linear_error():
    rng = np.random.default_rng(1)
    correction = Correction(16)
    mixed = np.eye(16, dtype=np.float32) + 0.3 * rng.normal(size=(16, 16)).astype(np.float32)
    shift = _scores(rng)
    for _ in range(600):
        scores = _scores(rng)
        correction.learn(scores, mixed @ scores + shift)
    scores = _scores(rng)
    actual = mixed @ scores + shift
    error = np.abs(correction.apply(scores[np.newaxis])[0] - actual).max()
    assert error < 0.1 * np.abs(scores - actual).max()


def test_a_correction_that_makes_it_worse_is_not_applied():
    """The plain scores are right; what is learnt in between from noise would only disturb."""
    rng = np.random.default_rng(2)
    correction = Correction(16)
    for _ in range(300):
        scores = _scores(rng)
        correction.learn(scores, scores + _scores(rng))
    scores = _scores(rng)[np.newaxis]
    np.testing.assert_array_equal(correction.apply(scores), scores)
