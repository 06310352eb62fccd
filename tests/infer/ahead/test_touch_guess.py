"""Guesses at what a chunk touches: counts by the later router, and how sure they are."""

import ctypes

import numpy as np
import pytest
import torch

from infer.ahead.touch_guess import BUCKET_COUNT, LEAST_SURE, MEMORY, SAMPLE_TOKENS, TouchGuess
from infer.blocks.moe import MoeFfn
from infer.kernels.ggml_cpu import GgmlKernels

DISTANCES = 2


@pytest.fixture
def trained(local_model, demo_model):
    made = []

    def kernels_of(bounds):
        made.append(GgmlKernels(bounds))
        return made[0]

    local = local_model(demo_model, kernels_of, context=400, chunk=400, exact=False)
    local.kernels = made[0]
    return local


@pytest.fixture
def guess(trained):
    return TouchGuess(trained.kernels, trained.shape.eps, trained.model.layers, DISTANCES)


def random_residual(local, count, seed):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_normal((count, local.shape.width), np.float32))


def expected_counts(local, layer, residual):
    """In float64: norm, router, sigmoid and bias; how many of the rows choose each expert."""
    block = local.model.layers[layer]
    (router,) = block.ffn.router.matrices
    weights = (ctypes.c_float * (router.rows * router.columns)).from_address(router.address)
    weights = np.frombuffer(weights, np.float32).reshape(router.rows, -1).astype(float)
    x = residual.double().numpy()
    x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + local.shape.eps)
    scores = 1 / (1 + np.exp(-(x * block.ffn_norm.double().numpy()) @ weights.T))
    biased = scores + block.ffn.bias.double().numpy()
    best = np.argsort(-biased, axis=1, kind="stable")[:, : block.ffn.routing.top_k]
    return np.bincount(best.reshape(-1), minlength=router.rows)


def test_layers_with_experts(guess, trained):
    layers = trained.model.layers
    assert guess.layers == [n for n, layer in enumerate(layers) if isinstance(layer.ffn, MoeFfn)]


@pytest.mark.parametrize("count", [5, 60])
def test_those_that_many_seem_to_choose_come_first(count, guess, trained):
    layer = guess.layers[2]
    residual = random_residual(trained, count, seed=count)
    counts = expected_counts(trained, layer, residual)
    candidates = np.arange(0, trained.experts.n_experts, 2)
    guess.sureness[:] = 1
    ranked = guess.likely(residual, 1, layer, candidates)
    assert sorted(ranked) == candidates.tolist()
    assert counts[ranked].tolist() == sorted(counts[candidates], reverse=True)


def test_of_a_long_chunk_some_tokens_are_looked_at(guess, trained):
    layer = guess.layers[0]
    count = 3 * SAMPLE_TOKENS - 7
    residual = random_residual(trained, count, seed=0)
    counts = expected_counts(trained, layer, residual[::3])
    every = np.arange(trained.experts.n_experts)
    guess.sureness[:] = 1
    ranked = guess.likely(residual, 1, layer, every)
    assert counts[ranked].tolist() == sorted(counts, reverse=True)


def test_what_seems_chosen_by_few_is_not_sure_at_first(guess, trained):
    layer = guess.layers[1]
    residual = random_residual(trained, 20, seed=3)
    counts = expected_counts(trained, layer, residual)
    every = np.arange(trained.experts.n_experts)
    sure = {e for e, n in enumerate(counts) if 1 - 0.5 ** (2 ** np.floor(np.log2(n or 0.5)))
            >= LEAST_SURE}  # fmt: skip
    assert set(guess.likely(residual, 1, layer, every)) == sure
    assert 0 < len(sure) < len(every)


def test_how_sure_is_learnt_by_count_and_distance(guess, trained):
    """What seems chosen by one token never comes; what seems chosen by none always does."""
    layer = guess.layers[1]
    residual = random_residual(trained, 5, seed=4)
    counts = expected_counts(trained, layer, residual)
    every = np.arange(trained.experts.n_experts)
    touched = np.flatnonzero(counts == 0)
    assert 0 < len(touched) < len(every)
    before = guess.sureness.copy()
    for _ in range(MEMORY):
        guess.likely(residual, 2, layer, every)
        guess.learn(layer, touched)
    np.testing.assert_array_equal(guess.sureness[0], before[0])
    assert guess.sureness[1, 0] > 0.95
    assert guess.sureness[1, 1] < 0.05
    assert set(guess.likely(residual, 2, layer, every)) >= set(touched)
    guess.forget()
    learnt = guess.sureness.copy()
    guess.learn(layer, every)
    np.testing.assert_array_equal(guess.sureness, learnt)


def test_only_what_was_in_no_slot_teaches(guess, trained):
    layer = guess.layers[1]
    residual = torch.zeros((5, trained.shape.width))
    before = guess.sureness.copy()
    guess.likely(residual, 1, layer, np.array([], int))
    guess.learn(layer, np.arange(trained.experts.n_experts))
    np.testing.assert_array_equal(guess.sureness, before)
    assert guess.sureness.shape == (DISTANCES, BUCKET_COUNT)


def test_a_trained_model_s_guesses_are_sure(guess, trained):
    """Of real text: what is said to be sure to be touched two layers on is, nearly always."""
    taken = {}
    ids = np.frombuffer(__doc__.encode() * 4, np.uint8).astype(int).tolist()
    layers, after = guess.layers, guess.layers[3]

    class Watching:
        guesses = True

        def begin(self, residual, end):
            """Nothing yet."""

        def stand(self, layer, residual):
            if layer == layers[1]:
                taken["sure"] = guess.likely(residual, 2, after, np.arange(16))

        def chosen(self, layer, experts):
            taken[layer] = experts
            return np.zeros(len(experts), bool)

        def advance(self, layer, waves):
            """Nothing is hinted."""

    trained.model.prompt_foresight = Watching()
    trained.logits(ids)
    hits = np.isin(taken["sure"], taken[after])
    assert len(hits) >= 8
    assert hits.mean() >= 0.9
