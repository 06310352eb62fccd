"""Which guessed tokens may stand, so that what comes out is distributed as without guessing.

A guess d drawn from the draft's distribution q stands with probability min(1, p(d) / q(d)), where p
is the model's; where it does not, the token is drawn anew from max(0, p - q), renormalised. Then
any token t comes out with probability

    min(p(t), q(t)) + (1 - sum min(p, q)) * max(0, p(t) - q(t)) / sum max(0, p - q)  =  p(t)

(Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", 2023,
appendix A.1). Greedy choice is the case of two distributions with one token each.
"""

import numpy as np

from infer.generation.sampler import Distribution


def acceptance(target: Distribution, draft: Distribution, token: int) -> float:
    """The probability with which `token`, drawn from `draft`, stands."""
    drafted = draft.probability(token)
    assert drafted > 0, "a draft cannot draw what has no probability"
    return min(1.0, target.probability(token) / drafted)


def residual(target: Distribution, draft: Distribution) -> Distribution:
    """What the token is drawn from where the draft's does not stand."""
    size = 1 + int(max(target.ids.max(), draft.ids.max()))
    drafted = np.zeros(size)
    drafted[draft.ids] = draft.probabilities
    lacking = np.maximum(target.probabilities - drafted[target.ids], 0.0)
    total = lacking.sum()
    # Distributions that differ by rounding alone: the draft's stands all but always.
    return Distribution(target.ids, lacking / total) if total > 0 else target
