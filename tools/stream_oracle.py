"""A prefetch that knows the future: what routers chose is written down, and hinted the next time.

It shows how much prediction could bring at the most. Both take the place of
infer.ahead.predict.Predictor.
"""

import numpy as np
from torch import Tensor

from infer.ahead.prefetch import Integers
from infer.daemon.client import SlotClient

# More hints than the daemon keeps of one client would only be refused.
LOOKAHEAD_ROUTERS = 8
Choice = tuple[int, Integers]  # layer, experts


class Recorder:
    """`choices`: of the tokens decoded one at a time, router by router."""

    sees_hits = True

    def __init__(self) -> None:
        self.choices: list[Choice] = []

    def look(
        self,
        layer: int,
        residual: Tensor,
        logits: Tensor | None = None,  # noqa: ARG002 - a Foresight's
        ids: Integers | None = None,
    ) -> None:
        if ids is not None and len(residual) == 1:
            self.choices.append((layer, ids[0].copy()))


class Oracle:
    """Hints what comes next in `choices`, which the same text has to lead to again."""

    sees_hits = True

    def __init__(self, choices: list[Choice], client: SlotClient) -> None:
        self._choices, self._client = choices, client
        self._place = 0
        self._told = np.zeros(len(choices), bool)
        self.hinted_count = 0

    def look(
        self,
        layer: int,
        residual: Tensor,
        logits: Tensor | None = None,  # noqa: ARG002 - a Foresight's
        ids: Integers | None = None,
    ) -> None:
        if ids is None or len(residual) > 1:
            return
        expected_layer, expected = self._choices[self._place]
        assert layer == expected_layer, "another text than the one that was recorded"
        assert np.array_equal(ids[0], expected), "another text than the one that was recorded"
        self._place += 1
        last = min(self._place + LOOKAHEAD_ROUTERS, len(self._choices))
        for place in range(self._place, last):
            if self._told[place]:
                continue
            layer, experts = self._choices[place]
            absent = experts[self._client.absent(layer, experts)]
            if len(absent):
                self._client.hint(layer, absent, place - self._place + 1)
                self.hinted_count += len(absent)
            # What is there now may be put out meanwhile: it is looked at until it is near.
            self._told[place] = len(absent) > 0 or place == self._place
