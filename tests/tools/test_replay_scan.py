"""A prompt put into a decode trace, by what it weighs."""

import math

import numpy as np
import pytest
from replay_scan import Texts, replay

from shared.scan import SCAN_ROUNDS


@pytest.fixture(scope="module")
def texts(shared_dir):
    return Texts.load(shared_dir / "traces" / "gptoss20b_routing.npz")


def _mean(texts, rounds):
    rates = [replay(texts, 0.4, 1000, 1000, rounds, seed) for seed in range(3)]
    return np.mean(rates, axis=0)


def test_what_decoding_uses_stays_and_what_follows_the_prompt_is_there(texts):
    before, beside_first, beside, behind_first, behind = _mean(texts, SCAN_ROUNDS)
    assert beside_first > before - 3
    full = _mean(texts, math.inf)
    assert full[0] == before
    assert beside_first > full[1] + 3, "what a prompt costs if it counts in full"
    assert beside > full[2]
    unseen = _mean(texts, 1e-6)
    assert behind_first > unseen[3] + 1, "what follows a prompt uses its experts"
    assert behind > unseen[4]
