"""Whether reading ahead pays, or the compute lane: tokens are timed with it and without, in turn.

What else is there, arithmetic, messages, slots put out, a disk that others use, cannot be known
from inside; the time of a token has it all.
"""

from math import sqrt
from statistics import median

BLOCK_TOKENS = 8
# With, without, with, ...; the first token of a block belongs to the one before.
BLOCK_COUNT = 10
FIRST_TRIAL_TOKENS = 64
LEAST_SETTLED_TOKENS = 256
MOST_SETTLED_TOKENS = 4096
# It is left as it was at first unless tokens take this much less time the other way, and more than
# chance explains.
CLEAR_SHARE = 0.03


class Trial:
    """`on` says whether the next token does it; at first, and where it makes no difference, as the
    `default` is. block_tokens, block_count: of each trial, the first of which begins after
    `first_tokens`."""

    def __init__(
        self,
        default: bool = True,
        first_tokens: int = FIRST_TRIAL_TOKENS,
        block_tokens: int = BLOCK_TOKENS,
        block_count: int = BLOCK_COUNT,
    ) -> None:
        self.on = self._verdict = self._default = default
        self._block_tokens, self._block_count = block_tokens, block_count
        self._settled_tokens = LEAST_SETTLED_TOKENS
        self._left_tokens = first_tokens
        self._block = -1  # -1: settled
        self._times_s: dict[bool, list[float]] = {True: [], False: []}

    def token_done(self, token_s: float) -> None:
        """A token has been decoded as `on` said."""
        if self._block >= 0 and self._left_tokens < self._block_tokens:
            self._times_s[self.on].append(token_s)
        self._left_tokens -= 1
        if self._left_tokens > 0:
            return
        self._block += 1
        if self._block < self._block_count:
            self._left_tokens = self._block_tokens
            self.on = self._block % 2 == 0
        else:
            self._settle()

    def _settle(self) -> None:
        with_s, uncertain_with_s = _middle(self._times_s[True])
        without_s, uncertain_without_s = _middle(self._times_s[False])
        clear_s = max(CLEAR_SHARE * with_s, uncertain_with_s + uncertain_without_s)
        loss_s = with_s - without_s
        verdict = loss_s < clear_s if self._default else loss_s < -clear_s
        longer = min(2 * self._settled_tokens, MOST_SETTLED_TOKENS)
        self._settled_tokens = longer if verdict == self._verdict else LEAST_SETTLED_TOKENS
        self.on = self._verdict = verdict
        self._left_tokens, self._block = self._settled_tokens, -1
        self._times_s = {True: [], False: []}


def _middle(times_s: list[float]) -> tuple[float, float]:
    """The median, and how uncertain it is: the median deviation over the root of the count."""
    middle_s = median(times_s)
    return middle_s, median(abs(t - middle_s) for t in times_s) / sqrt(len(times_s))
