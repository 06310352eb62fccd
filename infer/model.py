"""A transformer of any family: layers of attention and feed-forward blocks on a residual stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from infer.blocks.ffn import DenseFfn
from infer.blocks.moe import Ahead, MoeFfn, Tap
from infer.caches.cache import Cache, CacheShape
from infer.kernels.interface import Kernels
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.scratch import LatentBounds


@dataclass(frozen=True)
class ModelShape:
    """What the engine needs to know of any family.

    heads, kv_heads, head_dim: of attention as `Kernels.attention` computes it; `latent` where it is
    `Kernels.latent_attention` instead. `cache`: what the layers keep of a token.
    """

    n_layers: int
    width: int
    vocab_size: int
    context_length: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    cache: CacheShape
    latent: LatentBounds | None = None


class Attention(Protocol):
    def forward(
        self, x: Tensor, layer: int, kv: Any, start: int, exact: bool, tap: Tap | None = None
    ) -> Tensor:
        """`kv` is the family's own cache, what `ModelShape.cache` allocates."""


class Foresight(Protocol):
    """Looks at each layer to guess what the next ones need; infer.ahead.predict.Predictor.

    sees_hits: it is to look at every layer, even while no expert is ever missing.
    """

    sees_hits: bool

    def look(
        self,
        layer: int,
        residual: Tensor,
        logits: Tensor | None = None,
        ids: npt.NDArray[np.int32] | None = None,
    ) -> None: ...


class PromptForesight(Ahead, Protocol):
    """What a prompt's layers need, too, is guessed; infer.ahead.prompt_ahead.PromptAhead.

    guesses: whether it may; what a router has chosen is known without.
    """

    guesses: bool

    def begin(self, residual: Tensor, end: int) -> None:
        """A chunk, whose layers before `end` compute all of its tokens."""

    def stand(self, layer: int, residual: Tensor) -> None:
        """The residual stream [n, width] before the feed-forward block of a layer."""


class Turns(Protocol):
    """Hears when a layer's matrices are read; infer.resident.streamed_layers.StreamedLayers."""

    def enter(self, layer: int) -> None: ...

    def leave(self, layer: int) -> None: ...


class AllInPlace:
    """Turns where every matrix stays where it is."""

    def enter(self, layer: int) -> None: ...

    def leave(self, layer: int) -> None: ...


@dataclass(frozen=True)
class Layer:
    attention_norm: Tensor
    attention: Attention
    ffn_norm: Tensor
    ffn: DenseFfn | MoeFfn

    def forward(
        self,
        kernels: Kernels,
        eps: float,
        x: Tensor,
        number: int,
        kv: Cache,
        start: int,
        exact: bool,
        tap: Tap | None = None,
        foresight: Foresight | None = None,
        last_only: bool = False,
        ahead: PromptForesight | None = None,
    ) -> Tensor:
        """x [n, width] -> [n, width], or with last_only its last row alone; row i of x stands at
        position start + i of layer `number` of the cache."""
        normed = kernels.rms_norm(x, self.attention_norm, eps)
        mixed = self.attention.forward(normed, number, kv, start, exact, tap)
        if tap is not None:
            tap(f"attn_out.{number}", mixed)
        if last_only:
            x, mixed = x[-1:], mixed[-1:]
        x = x + mixed
        normed = kernels.rms_norm(x, self.ffn_norm, eps)
        if ahead is not None:
            ahead.stand(number, x)
        if isinstance(self.ffn, MoeFfn):
            look = partial(foresight.look, number, x) if foresight is not None else None
            return x + self.ffn.forward(normed, exact, tap, look, ahead)
        if foresight is not None:
            foresight.look(number, x)
        return x + self.ffn.forward(normed, exact)


class Model:
    def __init__(
        self,
        kernels: Kernels,
        shape: ModelShape,
        embedding: QuantMatrix,
        layers: Sequence[Layer],
        output_norm: Tensor,
        output: QuantMatrix,
        prompt_foresight: PromptForesight,
    ) -> None:
        self.shape = shape
        self._kernels = kernels
        self.embedding = embedding
        self.layers = tuple(layers)
        self.output_norm = output_norm
        self.output = kernels.group([output])
        self.foresight: Foresight | None = None
        self.prompt_foresight = prompt_foresight
        self.turns: Turns = AllInPlace()

    @property
    def recordable(self) -> bool:
        """Whether a step of one token can be recorded in CUDA graphs; see decode_graphs.py."""
        return all(hasattr(layer.attention, "step") for layer in self.layers)

    def forward(
        self,
        ids: Tensor,
        kv: Cache,
        exact: bool,
        last_only: bool,
        tap: Tap | None = None,
        watcher: Tap | None = None,
    ) -> Tensor:
        """ids int64 [n] at the positions after those in `kv` -> logits [n or 1, vocab].

        `kv` is advanced; after an exception it is as before. Where only the last logits are wanted,
        the last layer's feed-forward block computes nothing else, unless a tap sees it. A watcher
        hears of the hidden states as a tap does, but may count them only.
        """
        kernels, eps, start = self._kernels, self.shape.eps, kv.length
        last_layer = len(self.layers) - 1 if last_only and tap is None else None
        x = kernels.embed(self.embedding, ids)
        ahead = self.prompt_foresight if len(ids) > 1 else None
        if ahead is not None:
            ahead.begin(x, len(self.layers) if last_layer is None else last_layer)
        for number, layer in enumerate(self.layers):
            if tap is not None:
                tap(f"hidden.{number}", x)
            if watcher is not None:
                watcher(f"hidden.{number}", x)
            self.turns.enter(number)
            ends = number == last_layer
            x = layer.forward(
                kernels, eps, x, number, kv, start, exact, tap, self.foresight, ends, ahead
            )
            self.turns.leave(number)
        if watcher is not None:
            watcher(f"hidden.{len(self.layers)}", ids)
        if tap is not None:
            x = kernels.rms_norm(x, self.output_norm, eps)
            tap(f"hidden.{len(self.layers)}", x)
            x = x[-1:] if last_only else x
        else:
            x = kernels.rms_norm(x[-1:] if last_only else x, self.output_norm, eps)
        logits = kernels.linear(x, self.output, exact)[0]
        kv.length = start + len(ids)
        return logits
