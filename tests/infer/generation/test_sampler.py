import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.generation.sampler import Sampler, SamplerConfig, distribution
from shared.errors import ConfigError, ModelError

LOGITS = np.array([1.0, 3.0, 2.0, 3.0, -1.0, 0.5], np.float32)

configs = st.builds(
    SamplerConfig,
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 1),
)
rows = st.lists(st.integers(-40, 40), min_size=1, max_size=12).map(
    lambda quarters: np.array(quarters, np.float32) / 4
)


def expected_distribution(config, logits):
    """Written out token by token: {id: probability}."""
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if config.top_k:
        ranked = ranked[: config.top_k]
    total = math.fsum(math.exp(logits[i]) for i in ranked)
    if config.top_p < 1:
        kept, mass = [], 0.0
        for i in ranked:
            kept.append(i)
            mass += math.exp(logits[i]) / total
            if mass >= config.top_p:
                break
        ranked = kept
    if config.min_p:
        best = math.exp(logits[ranked[0]])
        ranked = [i for i in ranked if math.exp(logits[i]) >= config.min_p * best]
    weights = {i: math.exp(float(logits[i]) / config.temperature) for i in ranked}
    return {i: weight / math.fsum(weights.values()) for i, weight in weights.items()}


def near_a_cut(config, logits):
    """Whether rounding may decide which tokens stay."""
    ranked = sorted(logits, reverse=True)[: config.top_k or None]
    weights = np.exp(np.array(ranked, np.float64))
    masses = weights.cumsum() / weights.sum()
    ratios = weights / weights[0]
    return bool(
        (abs(masses - config.top_p) < 1e-6).any() or (abs(ratios - config.min_p) < 1e-6).any()
    )


@given(config=configs, logits=rows)
def test_distribution_is_the_analytic_one(config, logits):
    ids, probabilities = distribution(config, logits)
    assert math.isclose(probabilities.sum(), 1)
    if not near_a_cut(config, logits):
        got = dict(zip(ids.tolist(), probabilities.tolist(), strict=True))
        assert got == pytest.approx(expected_distribution(config, logits), rel=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        SamplerConfig(temperature=1.0, seed=1),
        SamplerConfig(temperature=0.5, seed=2),
        SamplerConfig(temperature=2.0, top_k=4, seed=3),
        SamplerConfig(temperature=1.0, top_p=0.8, seed=4),
        SamplerConfig(temperature=1.5, min_p=0.2, seed=5),
    ],
)
def test_draws_follow_the_distribution(config):
    draws = 20_000
    sampler = Sampler(config)
    counts = np.bincount([sampler.sample(LOGITS) for _ in range(draws)], minlength=len(LOGITS))
    expected = np.zeros(len(LOGITS))
    for token, probability in expected_distribution(config, LOGITS).items():
        expected[token] = probability * draws
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert chi_square < 25  # 5 degrees of freedom: exceeded once in 7,000 seeds


def test_greedy_takes_the_lower_of_equal_ids():
    assert Sampler(SamplerConfig(temperature=0)).sample(LOGITS) == 1


@pytest.mark.parametrize("config", [{"top_k": 1}, {"top_p": 1e-9}])
def test_the_smallest_cut_leaves_the_greedy_token(config):
    assert Sampler(SamplerConfig(temperature=2, **config)).sample(LOGITS) == 1


def test_min_p_keeps_ties_with_the_first():
    ids, _ = distribution(SamplerConfig(min_p=1.0), LOGITS)
    assert ids.tolist() == [1, 3]


def test_top_k_breaks_ties_by_the_lower_id():
    logits = np.zeros(1000, np.float32)
    logits[[7, 900]] = 1
    ids, _ = distribution(SamplerConfig(top_k=4), logits)
    assert ids.tolist() == [7, 900, 0, 1]


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999999, 1 - 1e-16])
def test_a_nucleus_in_a_large_vocabulary(top_p):
    logits = np.random.default_rng(6).standard_normal(20_000).astype(np.float32)
    ids, _ = distribution(SamplerConfig(top_p=top_p), logits)
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits[order].astype(np.float64))
    mass = weights.cumsum() / weights.sum()
    assert ids.tolist() == order[: np.searchsorted(mass, top_p) + 1].tolist()


def test_the_seed_decides_the_draws():
    def draws(seed):
        sampler = Sampler(SamplerConfig(temperature=1, seed=seed))
        return [sampler.sample(LOGITS) for _ in range(50)]

    assert draws(7) == draws(7)
    assert draws(7) != draws(8)
    assert draws(None) != draws(None)


def test_extreme_logits_do_not_overflow():
    logits = np.array([3e38, -3e38, 3e38], np.float32)
    ids, probabilities = distribution(SamplerConfig(temperature=0.01), logits)
    assert dict(zip(ids.tolist(), probabilities.tolist(), strict=True)) == {0: 0.5, 1: 0.0, 2: 0.5}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_are_refused(bad, temperature):
    logits = LOGITS.copy()
    logits[2] = bad
    with pytest.raises(ModelError, match=r"not finite \(token 2"):
        Sampler(SamplerConfig(temperature=temperature)).sample(logits)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 2},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_values_out_of_bounds_are_refused(bad):
    name = next(iter(bad)).replace("_", "-")
    with pytest.raises(ConfigError, match=name) as caught:
        SamplerConfig(**bad)
    assert caught.value.remedy
