"""A transformer of any family: layers of attention and feed-forward blocks on a residual stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from infer.blocks.ffn import DenseFfn
from infer.blocks.moe import MoeFfn, Tap
from infer.kernels.interface import Kernels
from infer.kernels.quant_matrix import QuantMatrix
from infer.kv_cache import KvCache


@dataclass(frozen=True)
class ModelShape:
    """What the engine needs to know of any family."""

    n_layers: int
    width: int
    vocab_size: int
    context_length: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float


class Attention(Protocol):
    def forward(self, x: Tensor, layer: int, kv: KvCache, start: int, exact: bool) -> Tensor: ...


@dataclass(frozen=True)
class Layer:
    attention_norm: Tensor
    attention: Attention
    ffn_norm: Tensor
    ffn: DenseFfn | MoeFfn


class Model:
    def __init__(
        self,
        kernels: Kernels,
        shape: ModelShape,
        embedding: QuantMatrix,
        layers: Sequence[Layer],
        output_norm: Tensor,
        output: QuantMatrix,
    ) -> None:
        self.shape = shape
        self._kernels = kernels
        self._embedding = embedding
        self._layers = tuple(layers)
        self._output_norm = output_norm
        self._output = kernels.group([output])

    def forward(
        self, ids: Tensor, kv: KvCache, exact: bool, last_only: bool, tap: Tap | None = None
    ) -> Tensor:
        """ids int64 [n] at the positions after those in `kv` -> logits [n or 1, vocab].

        `kv` is advanced; after an exception it is as before.
        """
        kernels, eps, start = self._kernels, self.shape.eps, kv.length
        x = kernels.embed(self._embedding, ids)
        for number, layer in enumerate(self._layers):
            if tap is not None:
                tap(f"hidden.{number}", x)
            normed = kernels.rms_norm(x, layer.attention_norm, eps)
            mixed = layer.attention.forward(normed, number, kv, start, exact)
            if tap is not None:
                tap(f"attn_out.{number}", mixed)
            x = x + mixed
            normed = kernels.rms_norm(x, layer.ffn_norm, eps)
            if isinstance(layer.ffn, MoeFfn):
                x = x + layer.ffn.forward(normed, exact, tap)
            else:
                x = x + layer.ffn.forward(normed, exact)
        kv.length = start + len(ids)
        x = kernels.rms_norm(x[-1:] if last_only else x, self._output_norm, eps)
        if tap is not None:
            tap(f"hidden.{len(self._layers)}", x)
        return kernels.linear(x, self._output, exact)[0]
