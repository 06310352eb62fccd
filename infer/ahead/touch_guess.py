"""Guesses at which experts a chunk of a prompt will touch in later layers.

A layer changes the residual stream by little, so the router of a later layer, applied to the
present one of each token, says about how many will choose each of its experts. An expert that many
seem to choose is nearly sure to be chosen by one of them. How sure is learnt from the choices that
follow, by the layers in between and by the count: of the experts guessed so that were in no slot
then, the share that was touched. Guesses change no result: they only become hints.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infer.blocks.moe import MoeFfn
from infer.kernels.interface import Kernels
from infer.model import Layer

# Of a longer chunk, tokens at even distances: so many tell the counts well enough.
SAMPLE_TOKENS = 256
# Counts are told apart by their power of two, these and all larger ones together.
BUCKET_COUNT = 7
# What is less sure to be touched is not read: a read in vain costs as much as the disk gains where
# it would have been idle, which is for a few reads a layer only.
LEAST_SURE = 0.95
# Of the experts with such a count, the last so many or so say how sure it is.
MEMORY = 256

Integers = npt.NDArray[np.integer[Any]]


class TouchGuess:
    """One for the layers of a model; `max_distance`: layers with experts that are looked ahead."""

    def __init__(
        self, kernels: Kernels, eps: float, layers: Sequence[Layer], max_distance: int
    ) -> None:
        self._kernels, self._eps = kernels, eps
        self._layers = {
            layer.ffn.layer: (layer, layer.ffn) for layer in layers if isinstance(layer.ffn, MoeFfn)
        }
        # Before anything is known: each of so many seeming choices stands with an even chance.
        fewest = [0, *(2**power for power in range(BUCKET_COUNT - 1))]
        self.sureness = np.tile(1 - 0.5 ** np.array(fewest, float), (max_distance, 1))
        self._open: dict[int, dict[int, tuple[Integers, Integers]]] = {}

    @property
    def layers(self) -> list[int]:
        """Those with experts, ascending."""
        return sorted(self._layers)

    def forget(self) -> None:
        """Guesses whose layers have not come."""
        self._open.clear()

    def likely(self, residual: Tensor, distance: int, layer: int, candidates: Integers) -> Integers:
        """Of some experts of a layer, those that are sure enough to be touched, the surest first.

        residual [n, width], as it is `distance` layers with experts before that layer's own.
        """
        counts = self._counts(residual, layer)[candidates]
        # 0, 1, 2 to 3, 4 to 7, ...
        buckets = np.minimum(np.frexp(np.floor(counts))[1], BUCKET_COUNT - 1)
        self._open.setdefault(layer, {})[distance] = candidates, buckets
        sure = self.sureness[distance - 1][buckets] >= LEAST_SURE
        ranked: Integers = candidates[sure][np.argsort(-counts[sure], kind="stable")]
        return ranked

    def _counts(self, residual: Tensor, layer: int) -> npt.NDArray[np.float64]:
        """How many of the tokens seem to choose each expert."""
        own, moe = self._layers[layer]
        rows = residual[:: -(-len(residual) // SAMPLE_TOKENS)].contiguous()
        normed = self._kernels.rms_norm(rows, own.ffn_norm, self._eps)
        logits = self._kernels.linear(normed, moe.router, exact=True)[0]
        routing = moe.routing
        ids, _ = self._kernels.route_sigmoid(logits, moe.bias, routing.top_k, routing.scale)
        choices = ids.to(device="cpu", dtype=torch.int64).numpy().reshape(-1)
        counts = np.bincount(choices, minlength=logits.shape[1])
        return counts * (len(residual) / len(rows))

    def learn(self, layer: int, touched: Integers) -> None:
        """What the router of a layer has chosen, each expert once."""
        for distance, (candidates, buckets) in self._open.pop(layer, {}).items():
            hits = np.isin(candidates, touched)
            sureness = self.sureness[distance - 1]
            for bucket in np.unique(buckets):
                seen = hits[buckets == bucket]
                rate = min(1.0, len(seen) / MEMORY)
                sureness[bucket] += rate * (seen.mean() - sureness[bucket])
