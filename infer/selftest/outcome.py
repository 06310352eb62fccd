"""What came of one comparison."""

import math
from typing import NamedTuple

from torch import Tensor

# Of float32 arithmetic with a float32 cache, relative to the largest number expected
EXACT_LIMIT = 1e-5


class Outcome(NamedTuple):
    """`error` is relative; None where there is nothing to compare, for the reason in `what`."""

    what: str
    error: float | None
    limit: float

    @property
    def passed(self) -> bool:
        return self.error is None or self.error < self.limit


def largest_error(result: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number expected; inf for what is no number.

    result on any device; expected float64 on the CPU.
    """
    error = float((result.double().cpu() - expected).abs().max() / expected.abs().max())
    return math.inf if math.isnan(error) else error
