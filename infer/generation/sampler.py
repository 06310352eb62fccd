"""Which token comes next: a draw from the logits of one row."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shared.errors import ConfigError, ModelError

MAX_TEMPERATURE = 100.0
MAX_SEED = 2**64 - 1
_NUCLEUS_START = 256


@dataclass(frozen=True)
class SamplerConfig:
    """
    temperature: 0 takes the largest logit.
    top_k: only so many of the most probable tokens; 0 = all.
    top_p: of these the fewest whose probabilities reach top_p; 1 = all.
    min_p: of these the ones at least min_p times as probable as the first; 0 = all.
    seed: None = another one each time.

    The three cuts are made in this order, on probabilities at temperature 1 (as in llama.cpp), so
    that a high temperature does not let in more of the tail. Raises ConfigError.
    """

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(0 <= self.temperature <= MAX_TEMPERATURE, "temperature", f"0 to {MAX_TEMPERATURE}")
        _require(self.top_k >= 0, "top-k", "0 (all tokens) or more")
        _require(0 < self.top_p <= 1, "top-p", "above 0, at most 1")
        _require(0 <= self.min_p <= 1, "min-p", "0 to 1")
        _require(self.seed is None or 0 <= self.seed <= MAX_SEED, "seed", "0 to 2^64 - 1")


def _require(good: bool, name: str, bounds: str) -> None:
    if not good:
        raise ConfigError(f"{name} is out of bounds", f"give {bounds}")


class Distribution(NamedTuple):
    """ids [n], each once, and their probabilities [n], float64, above 0 for a token to be drawn."""

    ids: np.ndarray
    probabilities: np.ndarray

    def probability(self, token: int) -> float:
        """0 for a token that is not among the ids."""
        return float(self.probabilities[self.ids == token].sum())


class Sampler:
    """Draws tokens; the draws of one object go on from each other, repeatable by the seed."""

    def __init__(self, config: SamplerConfig) -> None:
        self._config = config
        self._random = np.random.Generator(np.random.PCG64(config.seed))

    def sample(self, logits: np.ndarray) -> int:
        """logits: float32 [vocab]. The id of the next token; of equal logits the lower id counts
        as the larger.

        Raises ModelError where a logit is not finite: the model computed nonsense.
        """
        if self._config.temperature == 0:
            _check(logits)
            return int(logits.argmax())
        return self.draw(distribution(self._config, logits))

    def distribution(self, logits: np.ndarray) -> Distribution:
        """What `sample` draws from; at temperature 0 the largest logit's token alone."""
        if self._config.temperature == 0:
            _check(logits)
            return Distribution(np.array([logits.argmax()]), np.ones(1))
        return distribution(self._config, logits)

    def draw(self, choices: Distribution) -> int:
        """One of the ids."""
        mass = choices.probabilities.cumsum()
        drawn = mass.searchsorted(self._random.random() * mass[-1], side="right")
        return int(choices.ids[min(int(drawn), len(mass) - 1)])

    def chance(self, probability: float) -> bool:
        """True with that probability."""
        return self._random.random() < probability


def distribution(config: SamplerConfig, logits: np.ndarray) -> Distribution:
    """What `sample` draws from at a temperature above 0; logits: float32 [vocab]."""
    assert config.temperature > 0
    _check(logits)
    ids = np.arange(len(logits))
    if 0 < config.top_k < len(ids):
        ids = _largest(logits, config.top_k)
    if config.top_p < 1:
        ids = _nucleus(ids, logits[ids], config.top_p)
    kept = logits[ids]
    if config.min_p > 0:
        ids = ids[kept >= kept.max() + math.log(config.min_p)]
        kept = logits[ids]
    return Distribution(ids, _softmax(kept, config.temperature))


def _check(logits: np.ndarray) -> None:
    assert logits.ndim == 1
    assert len(logits) > 0
    if not np.isfinite(logits).all():
        bad = int(np.flatnonzero(~np.isfinite(logits))[0])
        raise ModelError(
            f"the model's logits are not finite (token {bad}: {logits[bad]})",
            "the model file may be damaged; try again with --exact",
        )


def _softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return weights / weights.sum()


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest, the largest first and equal ones by index. O(n)."""
    bound = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > bound)
    equal = np.flatnonzero(values == bound)[: count - len(above)]
    found = np.sort(np.concatenate((above, equal)))
    return found[np.argsort(-values[found], kind="stable")]


def _nucleus(ids: np.ndarray, logits: np.ndarray, top_p: float) -> np.ndarray:
    """The fewest of `ids`, most probable first, whose probabilities reach `top_p`.

    Looks at the largest few first: sorting a whole vocabulary for a nucleus of ten tokens costs
    more than all the rest.
    """
    probabilities = _softmax(logits, 1.0)
    size = _NUCLEUS_START
    while True:
        order = _largest(logits, min(size, len(ids)))
        mass = probabilities[order].cumsum()
        if mass[-1] >= top_p or size >= len(ids):
            return ids[order[: int(mass.searchsorted(top_p)) + 1]]
        size *= 8
