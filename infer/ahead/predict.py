"""Guesses at what the next layers' routers will choose, from the residual stream as it is now.

A layer changes the residual stream by little, so the router of a later layer, applied to the
present one (normed with that layer's weights), names most of what it will choose. What it errs by
is learnt while decoding, layer by layer. Guesses change no result: they only become hints.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infer.ahead.prefetch import Integers
from infer.blocks.moe import MoeFfn
from infer.kernels.interface import Kernels, MatrixGroup
from infer.model import Layer

# A chunk of more tokens touches most experts of a layer: that is for waves, not for guesses.
MAX_TOKENS = 4
# Steps of the correction; measured on trained models, and flat around these values.
MATRIX_RATE = 0.2
SHIFT_RATE = 1 / 64
ERROR_RATE = 1 / 64
# A layer's correction learns from each token at first, later from one of so many: that costs less.
EAGER_COUNT = 256
LAZY_EVERY = 4

Floats = npt.NDArray[np.float32]


class Correction:
    """Guessed scores [experts] -> scores nearer to those that the router will have.

    s + M s + c, learnt by normalised least mean squares (Haykin, Adaptive Filter Theory, ch. 7). As
    long as that does not come nearer than s itself, it is s.
    """

    def __init__(self, n_experts: int) -> None:
        self._matrix = np.zeros((n_experts, n_experts), np.float32)
        self._shift = np.zeros(n_experts, np.float32)
        self._step = np.empty_like(self._matrix)
        self._plain_error = self._error = 0.0
        self._learnt_count = 0

    def apply(self, scores: Floats) -> Floats:
        """Scores [n, experts], of n tokens."""
        if self._error >= self._plain_error:
            return scores
        return self._corrected(scores)

    def learn(self, scores: Floats, actual: Floats) -> None:
        """What was guessed for one token, and what the router then said; [experts] each."""
        self._learnt_count += 1
        if self._learnt_count > EAGER_COUNT and self._learnt_count % LAZY_EVERY:
            return
        plain = actual - scores
        error = actual - self._corrected(scores[np.newaxis])[0]
        self._plain_error += ERROR_RATE * (float(plain @ plain) - self._plain_error)
        self._error += ERROR_RATE * (float(error @ error) - self._error)
        np.outer(error * (MATRIX_RATE / (1 + float(scores @ scores))), scores, out=self._step)
        self._matrix += self._step
        self._shift += SHIFT_RATE * error

    def _corrected(self, scores: Floats) -> Floats:
        return scores + scores @ self._matrix.T + self._shift


@dataclass(frozen=True)
class _Gate:
    """What a layer's router is made of; bias float32 [experts]."""

    norm: Tensor
    router: MatrixGroup
    bias: Floats


class Listener(Protocol):
    """Who says what to guess, and makes something of it; infer.ahead.prefetch.Prefetch."""

    candidate_count: int

    def pause(self) -> None: ...

    def targets(self, layer: int) -> Sequence[tuple[int, int]]: ...

    def chosen(self, layer: int, experts: Sequence[int]) -> None: ...

    def forecast(self, forecasts: Mapping[tuple[int, int], Integers]) -> None: ...


class Predictor:
    """`look` at each layer, when the residual stream stands before its feed-forward block."""

    sees_hits = False

    def __init__(
        self,
        kernels: Kernels,
        eps: float,
        layers: Sequence[Layer],
        listener: Listener,
        make_correction: Callable[[int], Correction] = Correction,
    ) -> None:
        self._listener = listener
        self._make_correction = make_correction
        self._kernels, self._eps = kernels, eps
        self._gates = {
            number: _gate(layer, layer.ffn)
            for number, layer in enumerate(layers)
            if isinstance(layer.ffn, MoeFfn)
        }
        self._corrections: dict[tuple[int, int], Correction] = {}
        self._guessed: dict[int, list[tuple[Correction, Floats]]] = {}  # by layer
        self._last_layer = -1

    def look(
        self,
        layer: int,
        residual: Tensor,
        logits: Tensor | None = None,
        ids: Integers | None = None,
    ) -> None:
        """residual [n, width]; logits [n, experts] and ids [n, top_k] of the layer's own router,
        where it has one: compared with what was guessed, and then the next layers are."""
        if len(residual) > MAX_TOKENS:
            self._listener.pause()
            return
        if layer <= self._last_layer:  # another token; an error may have cut the last one short
            self._guessed.clear()
        self._last_layer = layer
        targets = self._listener.targets(layer)
        found = [self._scores(residual, target) for _, target in targets]
        if logits is None or ids is None:
            self.guess(dict(zip(targets, _to_host(found), strict=True)))
            return
        actual, *scores = _to_host([logits, *found])
        self.choice(layer, ids)
        self.guess(dict(zip(targets, scores, strict=True)))
        self.learn(layer, actual)

    def _scores(self, residual: Tensor, layer: int) -> Tensor:
        """What the router of a later layer makes of the residual stream: [n, experts]."""
        gate = self._gates[layer]
        normed = self._kernels.rms_norm(residual, gate.norm, self._eps)
        return self._kernels.linear(normed, gate.router, exact=True)[0]

    # On the host

    def choice(self, layer: int, ids: Integers) -> None:
        """A router's choice [n, top_k]."""
        experts = ids[0].tolist() if len(ids) == 1 else np.unique(ids).tolist()
        self._listener.chosen(layer, experts)

    def learn(self, layer: int, logits: Floats) -> None:
        """What was guessed of a router's logits [n, experts], which these are."""
        for correction, scores in self._guessed.pop(layer, ()):
            if len(logits) == 1:
                correction.learn(scores, logits[0])

    def guess(self, scores: Mapping[tuple[int, int], Floats]) -> None:
        """Scores [n, experts] of later layers: the likeliest experts of each to the listener."""
        if scores:
            ranked = {target: self._rank(own, *target) for target, own in scores.items()}
            self._listener.forecast(ranked)

    def _rank(self, scores: Floats, distance: int, layer: int) -> Integers:
        """The likeliest experts of a layer first, as many as are asked for."""
        correction = self._corrections.get((layer, distance))
        if correction is None:
            correction = self._make_correction(scores.shape[1])
            self._corrections[layer, distance] = correction
        if len(scores) == 1:
            self._guessed.setdefault(layer, []).append((correction, scores[0]))
        likely = _sigmoid(correction.apply(scores)) + self._gates[layer].bias
        best = likely[0] if len(likely) == 1 else likely.max(axis=0)
        return np.argsort(-best, kind="stable")[: self._listener.candidate_count]


def _to_host(tensors: list[Tensor]) -> list[Floats]:
    """Float32 tensors of one shape as arrays; from a GPU in one copy, for which it is waited."""
    if not tensors or tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    return list(torch.stack(tensors).cpu().numpy())


def _gate(layer: Layer, ffn: MoeFfn) -> _Gate:
    bias: Any = 0.0 if ffn.bias is None else ffn.bias.cpu().numpy()
    experts = ffn.router.matrices[0].rows
    return _Gate(layer.ffn_norm, ffn.router, np.broadcast_to(np.float32(bias), (experts,)))


def _sigmoid(x: Floats) -> Floats:
    """By tanh, which does not overflow."""
    return np.float32(0.5) * (np.float32(1) + np.tanh(np.float32(0.5) * x))
