"""Whether reading ahead pays, told from the times of tokens."""

import random

from infer.ahead.prefetch_trial import (
    BLOCK_COUNT,
    BLOCK_TOKENS,
    FIRST_TRIAL_TOKENS,
    LEAST_SETTLED_TOKENS,
    MOST_SETTLED_TOKENS,
    Trial,
)

TRIAL_TOKENS = BLOCK_TOKENS * BLOCK_COUNT


def _decode(trial, with_s, without_s, count, jitter=0.0):
    """For so many tokens, whether each was read ahead for."""
    rng = random.Random(1)
    states = []
    for _ in range(count):
        states.append(trial.on)
        token_s = with_s if trial.on else without_s
        trial.token_done(token_s * rng.uniform(1 - jitter, 1 + jitter))
    return states


def test_it_is_on_until_something_is_known():
    assert all(_decode(Trial(), 1.0, 0.1, FIRST_TRIAL_TOKENS))


def test_what_is_off_by_default_is_switched_on_where_it_clearly_pays():
    for with_s, expected in ((0.9, True), (1.0, False), (0.99, False), (1.2, False)):
        trial = Trial(False, first_tokens=8, block_tokens=16, block_count=6)
        assert not any(_decode(trial, with_s, 1.0, 8))
        assert sum(_decode(trial, with_s, 1.0, 6 * 16)) == 3 * 16
        assert _decode(trial, with_s, 1.0, LEAST_SETTLED_TOKENS) == [expected] * 256


def test_both_ways_get_as_many_tokens():
    trial = Trial()
    _decode(trial, 1.0, 1.0, FIRST_TRIAL_TOKENS)
    states = _decode(trial, 1.0, 1.0, TRIAL_TOKENS)
    assert sum(states) == TRIAL_TOKENS // 2


def test_it_stays_off_where_it_costs():
    trial = Trial()
    _decode(trial, 1.2, 1.0, FIRST_TRIAL_TOKENS + TRIAL_TOKENS, jitter=0.1)
    assert not any(_decode(trial, 1.2, 1.0, LEAST_SETTLED_TOKENS))


def test_it_stays_on_where_it_brings_something_or_nothing():
    for with_s in (0.7, 1.0):
        trial = Trial()
        _decode(trial, with_s, 1.0, FIRST_TRIAL_TOKENS + TRIAL_TOKENS)
        assert all(_decode(trial, with_s, 1.0, LEAST_SETTLED_TOKENS))


def test_it_changes_its_mind_when_things_change():
    trial = Trial()
    _decode(trial, 1.5, 1.0, FIRST_TRIAL_TOKENS + TRIAL_TOKENS)
    assert not trial.on
    _decode(trial, 0.5, 1.0, LEAST_SETTLED_TOKENS + TRIAL_TOKENS)
    assert trial.on


def test_one_slow_token_decides_nothing():
    """A user's pause at the prompt, another program's burst."""
    trial = Trial()
    _decode(trial, 0.9, 1.0, FIRST_TRIAL_TOKENS + 1)
    trial.token_done(1000.0)
    _decode(trial, 0.9, 1.0, TRIAL_TOKENS - 2)
    assert trial.on


def test_trials_become_rare_while_their_outcome_is_the_same():
    trial = Trial()
    states = _decode(trial, 0.9, 1.0, 40 * MOST_SETTLED_TOKENS)
    off_count = len(states) - sum(states)
    assert off_count < 0.02 * len(states)
