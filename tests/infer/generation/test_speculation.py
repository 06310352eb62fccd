"""The algebra of guessing: enumerated exactly, what comes out is the model's own distribution."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.generation.sampler import Distribution, Sampler, SamplerConfig
from infer.generation.speculation import acceptance, residual

VOCAB_COUNT = 6


def outcome(target: Distribution, draft: Distribution) -> np.ndarray:
    """float64 [vocab]: how probable each token is, summed over guesses and what becomes of them."""
    total = np.zeros(VOCAB_COUNT)
    for guess, probability in zip(draft.ids, draft.probabilities, strict=True):
        stands = acceptance(target, draft, int(guess)) if probability > 0 else 0.0
        total[guess] += probability * stands
        anew = residual(target, draft)
        total[anew.ids] += probability * (1 - stands) * anew.probabilities
    return total


def dense(choices: Distribution) -> np.ndarray:
    values = np.zeros(VOCAB_COUNT)
    values[choices.ids] = choices.probabilities
    return values


@st.composite
def distributions(draw) -> Distribution:
    ids = draw(st.lists(st.sampled_from(range(VOCAB_COUNT)), min_size=1, unique=True))
    weights = draw(st.lists(st.integers(1, 1000), min_size=len(ids), max_size=len(ids)))
    return Distribution(np.array(ids), np.array(weights) / sum(weights))


@given(distributions(), distributions())
def test_what_comes_out_is_distributed_as_without_guessing(target, draft):
    np.testing.assert_allclose(outcome(target, draft), dense(target), atol=1e-12)


@given(distributions(), distributions())
def test_no_rule_lets_more_guesses_stand(target, draft):
    stands = sum(p * acceptance(target, draft, int(token)) for token, p in zip(*draft, strict=True))
    np.testing.assert_allclose(stands, np.minimum(dense(target), dense(draft)).sum(), atol=1e-12)


def test_guesses_of_the_same_distribution_always_stand():
    same = Distribution(np.array([4, 1]), np.array([0.25, 0.75]))
    assert acceptance(same, same, 4) == acceptance(same, same, 1) == 1
    assert (dense(residual(same, same)) == dense(same)).all()


@pytest.mark.parametrize(("largest", "stands"), [(2, 1), (5, 0)])
def test_greedy_guesses_stand_if_they_are_the_models_choice(largest, stands):
    greedy = Sampler(SamplerConfig(temperature=0))
    logits = np.zeros(VOCAB_COUNT, np.float32)
    logits[largest] = 1
    target, draft = greedy.distribution(logits), Distribution(np.array([2]), np.ones(1))
    assert acceptance(target, draft, 2) == stands
    if not stands:
        assert greedy.draw(residual(target, draft)) == largest
