"""What a prompt's chunk has the disk read ahead, so that it does not stand still in between.

    layer L                           layer L + 1
    wave | wave | wave | wave         wave | wave | ...
      ^     \\____________________/     \\____________/
      |      known: the router has      guessed from the residual stream: what is sure enough
    is read  chosen them

While one wave is read and computed, hints name what comes after it: first what the router of this
layer has chosen for its other waves, then what those of the next layers seem to. So much at a time
as the daemon reads ahead. What is in no slot is hinted once a chunk, and what has been hinted is
used first, since its slots are held until then.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from infer.ahead.predict import MAX_TOKENS
from infer.ahead.touch_guess import Integers, TouchGuess
from infer.blocks.moe import ExpertSource
from shared.wire import MAX_HINT_EXPERTS

# Experts that are hinted and not yet used, all layers together.
WINDOW = 48
# Layers with experts that are looked ahead, where those between are read already.
MAX_DISTANCE = 2
# A hint is forgotten after 2 s (docs/protocol.md): what is needed so late is not hinted yet.
HORIZON_S = 1.5
WAVE_RATE = 1 / 4

Booleans = npt.NDArray[np.bool_]


class PromptAhead:
    """Told of each layer in turn: `begin` a chunk, then `stand`, `chosen`, `advance` each wave.

    guess: None where only what is known is hinted. With `guesses` off it is as if there were none.
    """

    def __init__(
        self,
        source: ExpertSource,
        n_experts: int,
        guess: TouchGuess | None = None,
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.guesses = True
        self._source = source
        self._guess = guess
        self._clock_s = clock_s
        self._layers = guess.layers if guess is not None else []
        self._all = np.arange(n_experts)
        self._hinted: dict[int, Booleans] = {}  # by layer: not used yet
        self._likely: dict[int, Integers] = {}  # by layer, guessed where `_residual` stands
        self._residual: Tensor | None = None
        self._end = -1  # layers from here on are not guessed
        self._last_s: float | None = None
        self._wave_s = 0.0

    def begin(self, residual: Tensor, end: int) -> None:
        """A chunk of n tokens, residual [n, width], whose layers before `end` compute all of it."""
        self._hinted.clear()
        if self._guess is not None:
            self._guess.forget()
        is_prompt = len(residual) > MAX_TOKENS  # else it is decoded, with guesses of another kind
        self._end = end if is_prompt and self.guesses else -1
        self._last_s = None
        self.stand(-1, residual)

    def stand(self, layer: int, residual: Tensor) -> None:
        """The residual stream before the feed-forward block of a layer; -1: before all of them."""
        self._likely.clear()
        if layer < self._end:
            self._residual = residual
            if layer not in self._layers:
                self.advance(layer, ())

    def chosen(self, layer: int, experts: Integers) -> Booleans:
        """What the router of a layer has chosen, each once; which of it have been hinted."""
        if self._guess is not None:
            self._guess.learn(layer, experts)
        hinted: Booleans = self._row(layer)[experts]
        return hinted

    def advance(self, layer: int, waves: Sequence[Integers]) -> None:
        """A wave of a layer has been asked for; `waves` of it are yet to come."""
        self._time_wave()
        hinted = self._row(layer)
        coming = np.zeros_like(hinted)
        for experts in waves:
            coming[experts] = True
        hinted &= coming
        room = WINDOW - sum(map(np.count_nonzero, self._hinted.values()))
        for sections, experts in enumerate(waves, 1):
            if sections == 1:  # whatever it is: from a tier below it is brought up, too
                wanted = self._source.absent(layer, experts)
                room -= self._hint(layer, experts[wanted & ~hinted[experts]], 1)
                continue
            if room <= 0 or self._is_far(sections):
                break
            wanted = self._source.unread(layer, experts)
            room -= self._hint(layer, experts[wanted & ~hinted[experts]][:room], sections)
        self._look_further(layer, len(waves), room)
        if not waves:
            self._residual = None  # it may be large

    def _look_further(self, layer: int, sections: int, room: int) -> None:
        """Hint what the next layers will touch; `sections` are left of this one."""
        if self._residual is None:  # the last wave once more: this client had been stopped
            return
        coming = [at for at in self._layers if layer < at < self._end]
        for distance, target in enumerate(coming[:MAX_DISTANCE], 1):
            if room <= 0 or self._is_far(sections + 1):
                return
            wave_experts = self._source.wave_experts(target)
            sections += -(-len(self._all) // wave_experts)
            unread = self._source.unread(target, self._all)
            if not unread.any():
                continue
            likely = self._likely_in(target, distance, unread)
            wanted = likely[unread[likely] & ~self._row(target)[likely]]
            room -= self._hint(target, wanted[:room], sections)

    def _likely_in(self, layer: int, distance: int, unread: Booleans) -> Integers:
        if layer not in self._likely:
            assert self._guess is not None
            assert self._residual is not None
            candidates = unread.nonzero()[0]
            self._likely[layer] = self._guess.likely(self._residual, distance, layer, candidates)
        return self._likely[layer]

    def _hint(self, layer: int, experts: Integers, sections: int) -> int:
        """How many of them the disk has to read."""
        if not len(experts):
            return 0
        experts = experts[:MAX_HINT_EXPERTS]
        self._source.hint(layer, experts, sections)
        unread = experts[self._source.unread(layer, experts)]
        self._row(layer)[unread] = True
        return len(unread)

    def _row(self, layer: int) -> Booleans:
        row = self._hinted.get(layer)
        if row is None:
            row = self._hinted[layer] = np.zeros(len(self._all), np.bool_)
        return row

    def _time_wave(self) -> None:
        now_s = self._clock_s()
        if self._last_s is not None:
            self._wave_s += WAVE_RATE * (now_s - self._last_s - self._wave_s)
        self._last_s = now_s

    def _is_far(self, sections: int) -> bool:
        return sections > 1 and sections * self._wave_s > HORIZON_S
