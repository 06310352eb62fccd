"""LFU with ageing: heat is use, halved as lookups go by."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.policy import HALF_LIFE_ROUNDS, SCAN_WORTH, LfuAgeing

KEYS = 4


def uses(*counts):
    return np.array(counts, np.uint32)


def test_heat_is_the_number_of_uses():
    policy = LfuAgeing(KEYS, half_life_rounds=100)
    policy.absorb(uses(1, 0, 2, 0))
    policy.absorb(uses(1, 0, 0, 3))
    assert policy.heat.tolist() == [2, 0, 2, 3]


def test_a_use_counts_half_after_the_half_life():
    policy = LfuAgeing(KEYS, half_life_rounds=2.5)
    policy.absorb(uses(8, 0, 0, 0))
    policy.absorb(uses(0, 1, 0, 0))
    assert policy.heat.tolist() == [8, 1, 0, 0]
    policy.absorb(uses(0, 1, 0, 0))  # ten lookups: 2.5 rounds of four experts
    assert policy.heat.tolist() == [4, 1, 0, 0]


def test_the_default_half_life():
    policy = LfuAgeing(KEYS)
    half_life_lookups = round(HALF_LIFE_ROUNDS * KEYS)
    policy.absorb(uses(half_life_lookups - 1, 0, 0, 0))
    assert policy.heat[0] == half_life_lookups - 1
    policy.absorb(uses(1, 0, 0, 0))
    assert policy.heat[0] == half_life_lookups / 2


@pytest.mark.parametrize("count", [1, 7, 48, 500])
def test_uses_absorbed_at_once_weigh_as_if_one_by_one(count):
    """To within what the order of two experts' uses makes out."""
    stepped, at_once = LfuAgeing(KEYS, 4), LfuAgeing(KEYS, 4)
    for policy in (stepped, at_once):
        policy.absorb(uses(5, 0, 0, 1))
    for number in range(3 * count):
        stepped.absorb(uses(0, number % 3 != 0, number % 3 == 0, 0))
    at_once.absorb(uses(0, 2 * count, count, 0))
    np.testing.assert_allclose(at_once.heat, stepped.heat, atol=0.5)
    assert at_once.heat[1] == pytest.approx(2 * at_once.heat[2])


def test_parts_of_uses_add_up():
    policy = LfuAgeing(KEYS, half_life_rounds=1)
    for _ in range(7):
        policy.absorb(np.array([0.5, 0, 0, 0]))
    assert policy.heat[0] == 3.5
    policy.absorb(np.array([0, 0.5, 0, 0]))
    assert policy.heat.tolist() == [1.75, 0.25, 0, 0]


@pytest.mark.timeout(5)
def test_absurd_counts_take_no_time():
    policy = LfuAgeing(KEYS)
    policy.absorb(uses(2**32 - 1, 2**32 - 1, 7, 0))
    assert np.isfinite(policy.heat).all()
    policy.absorb(uses(0, 0, 0, 1))
    assert policy.heat[3] > 0


def test_what_was_hot_long_ago_becomes_colder_than_what_is_warm_now():
    policy = LfuAgeing(KEYS)
    policy.absorb(uses(1000, 0, 0, 0))
    for _ in range(200):
        policy.absorb(uses(0, 1, 1, 1))
    assert policy.heat[0] < policy.heat[1]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.integers(0, 40),
)
def test_the_coldest_are_what_a_stable_sort_puts_first(heats, count):
    policy = LfuAgeing(len(heats))
    policy.heat[:] = heats
    keys = np.arange(len(heats), dtype=np.int32)[::-1]
    expected = sorted(range(len(heats)), key=lambda at: heats[keys[at]])
    assert policy.coldest(keys, count).tolist() == expected[:count]


LAYERS = 4  # of one expert each


def worth_of_layers(*scan_layers):
    policy = LfuAgeing(LAYERS)
    policy.expect(scan_layers, LAYERS)
    return (policy.worth(np.arange(LAYERS)) / SCAN_WORTH).tolist()


def test_what_a_prompt_reaches_soon_is_worth_most_and_what_it_has_passed_least():
    assert worth_of_layers() == [0, 0, 0, 0]
    assert worth_of_layers(0) == [1, 0.75, 0.5, 0.25]
    assert worth_of_layers(2) == [0.5, 0.25, 1, 0.75]


def test_of_several_prompts_the_one_that_comes_first_counts():
    assert worth_of_layers(0, 2) == [1, 0.75, 1, 0.75]


def test_what_is_expected_adds_to_heat_until_it_is_over():
    policy = LfuAgeing(LAYERS)
    policy.absorb(uses(2, 0, 0, 1))
    policy.expect([1], LAYERS)
    keys = np.arange(LAYERS, dtype=np.int32)
    assert policy.worth(keys).tolist() == [2 + SCAN_WORTH / 4, SCAN_WORTH, SCAN_WORTH * 0.75, 2.0]
    assert policy.worth(3) == 2.0
    assert policy.coldest(keys, 2).tolist() == [2, 1] if SCAN_WORTH < 2 else [2, 3]
    policy.expect([], LAYERS)
    assert policy.worth(keys).tolist() == policy.heat.tolist() == [2, 0, 0, 1]
