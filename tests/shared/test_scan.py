"""How much a prompt weighs: as much as so many rounds of decoding, whatever its length."""

import numpy as np
import pytest

from shared.policy import HALF_LIFE_ROUNDS, LfuAgeing
from shared.scan import SCAN_ROUNDS, USE_PARTS, is_scan, use_parts

# (top_k, n_experts) of Hy3, GLM-5.2 and the models in tests.
SHAPES = [(8, 192), (8, 256), (4, 32), (4, 16), (2, 8)]


@pytest.mark.parametrize(("top_k", "n_experts"), SHAPES)
def test_tokens_of_decoding_and_of_short_prompts_count_in_full(top_k, n_experts):
    longest = int(SCAN_ROUNDS * n_experts / top_k)
    for token_count in (1, 2, longest):
        assert use_parts(token_count, top_k, n_experts) == USE_PARTS
    assert use_parts(longest + 1, top_k, n_experts) < USE_PARTS


@pytest.mark.parametrize(("top_k", "n_experts"), SHAPES)
@pytest.mark.parametrize("token_count", [129, 600, 2047, 8192])
def test_long_prompts_weigh_the_same(token_count, top_k, n_experts):
    rounds = token_count * top_k / n_experts * use_parts(token_count, top_k, n_experts) / USE_PARTS
    assert rounds == pytest.approx(SCAN_ROUNDS, rel=0.1)


def test_a_prompt_of_any_length_counts():
    assert use_parts(10**9, 8, 192) == 1


@pytest.mark.parametrize("token_count", [600, 8000])
def test_what_was_hot_keeps_half_of_the_heat(token_count):
    """A model of 4 layers computes a prompt layer by layer; each of its experts is used as often.

    Layers are as hot as each other behind it: the last ones have not aged the first ones away.
    """
    n_layers, n_experts, top_k = 4, 16, 2
    policy = LfuAgeing(n_layers * n_experts)
    hot = np.arange(n_layers) * n_experts  # expert 0 of each layer
    uses = np.zeros(n_layers * n_experts)
    uses[hot] = 16
    policy.absorb(uses)
    before = policy.heat[hot].sum()
    parts = use_parts(token_count, top_k, n_experts)
    for layer in range(n_layers):
        uses[:] = 0
        used = slice(layer * n_experts + 1, (layer + 1) * n_experts)
        uses[used] = token_count * top_k / (n_experts - 1) * parts / USE_PARTS
        policy.absorb(uses)
    kept = policy.heat[hot].sum() / before
    assert kept == 0.5
    layers = np.delete(policy.heat.reshape(n_layers, n_experts), 0, axis=1).sum(axis=1)
    assert layers.max() <= 2.01 * layers.min()
    assert policy.heat[hot].min() > policy.heat[np.setdiff1d(np.arange(64), hot)].max()


def test_a_prompt_weighs_one_half_life():
    assert SCAN_ROUNDS == HALF_LIFE_ROUNDS


def test_a_prompt_is_looked_ahead_for_if_it_chooses_as_often_as_there_are_experts():
    assert not is_scan(1, 8, 192)
    assert not is_scan(23, 8, 192)
    assert is_scan(24, 8, 192)
