"""Shares by distance and rank, of what was missing alone."""

import pytest

from infer.ahead.likelihood import ASSUMED_COUNT, LEAST_LIKELY, MEMORY_COUNT, Likelihood


def test_before_anything_is_known_the_top_k_are_likely():
    likelihood = Likelihood(top_k=2, candidate_count=4, max_distance=3)
    for distance in (1, 2, 3):
        assert list(likelihood.at(distance)) == [0.5, 0.5, LEAST_LIKELY, LEAST_LIKELY]


def test_only_what_was_missing_counts_and_at_its_own_distance_and_rank():
    likelihood = Likelihood(2, 4, 3)
    before = list(likelihood.at(2))
    for _ in range(4 * MEMORY_COUNT):
        likelihood.learn(2, [7, 8, 9, 10], [True, False, True, False], {7, 8})
    first, second, third, fourth = likelihood.at(2)
    assert (second, fourth) == (before[1], before[3])
    assert first > 0.95
    assert third < 0.05
    assert list(likelihood.at(1)) == before


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_it_comes_to_the_share_of_the_chosen(share):
    """With the noise of as many as are remembered: within three standard deviations."""
    likelihood = Likelihood(1, 1, 1)
    for number in range(4 * MEMORY_COUNT):
        likelihood.learn(1, [0], [True], {0} if number % 4 < 4 * share else set())
    assert likelihood.at(1)[0] == pytest.approx(share, abs=0.05)


def test_the_first_ones_count_most():
    """What was assumed is worth a few cases; what has been learnt, many."""
    likelihood = Likelihood(1, 1, 1)
    for _ in range(ASSUMED_COUNT):
        likelihood.learn(1, [0], [True], {0})
    assert likelihood.at(1)[0] == pytest.approx(0.75, abs=0.01)
    for _ in range(4 * MEMORY_COUNT):
        likelihood.learn(1, [0], [True], {0})
    for _ in range(ASSUMED_COUNT):
        likelihood.learn(1, [0], [True], set())
    assert likelihood.at(1)[0] > 0.95
