"""How an answer's tokens come about: each from the logits that the token before it led to."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from infer.engine import Engine
from infer.generation.sampler import Sampler


class Decoding:
    """Token by token: `extend` a prompt, then in turn `draw` a token and `take` it.

    guessed_count, accepted_count: guesses at tokens so far, and those that stood.
    """

    guessed_count = accepted_count = 0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._logits: npt.NDArray[np.float32] = np.empty(0, np.float32)

    def rewind(self, kept_count: int) -> int:
        """Forget what lies behind the first `kept_count` tokens, and perhaps a few of these.

        Returns how many are kept; `extend` has to begin with the token behind them.
        """
        self._engine.kv.truncate(kept_count)
        return kept_count

    def planes(self) -> dict[str, Tensor]:
        """All that is kept of tokens, as `Cache.planes`: for saving, and for restoring at once."""
        return self._engine.kv.planes()

    @property
    def whole_count(self) -> int:
        """Tokens of which the planes have everything."""
        return self._engine.kv.length

    def restored(self, token_count: int) -> None:
        """The planes have been filled from outside, with so many tokens."""
        self._engine.kv.length = token_count

    def extend(self, ids: Sequence[int]) -> None:
        """Compute `ids` behind what is held; RequestError, and nothing has changed, if they do not
        fit."""
        self._logits = self._engine.extend(ids)

    def draw(self, sampler: Sampler) -> int:
        """The next token, which is not held yet."""
        return sampler.sample(self._logits)

    def take(self, token: int, sampler: Sampler) -> None:  # noqa: ARG002 - for those who guess
        """Hold the token that was drawn; there must be room for it."""
        self.extend([token])
