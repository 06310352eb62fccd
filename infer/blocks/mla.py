"""Multi-head latent attention, sparse where an indexer selects what is read.

All heads share one key a position, [latent | rotated key], and the latent is the value as well.
The matrices that would expand a latent to a head's key and value are applied to the head's query
and output instead ("absorbed": DeepSeek-V2, section 2.1.2):

    score_h = (K_h^T q_h) . latent + rotated q_h . rotated key        out_h = V_h (sum a latent)

Only the first chunk of a prompt is expanded, if it is large: see `mla_expanded`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infer.blocks import mla_expanded
from infer.blocks.attention import RopeTables, StepPlace
from infer.blocks.indexer import Indexer, IndexerWeights
from infer.blocks.mla_expanded import HEAD_DIM_STEP, ExpandedAttention
from infer.blocks.moe import Tap
from infer.caches.latent_cache import LatentCache
from infer.kernels.interface import Kernels
from infer.kernels.quant_matrix import QuantMatrix


@dataclass(frozen=True)
class MlaShape:
    """nope, rope: of a head's query, what is not rotated and then what is."""

    heads: int
    nope: int
    rope: int
    kv_lora: int
    value_dim: int
    eps: float


@dataclass(frozen=True)
class MlaWeights:
    """q_a [q_lora, d_model], q_b [heads * (nope + rope), q_lora], kv_a [kv_lora + rope, d_model];
    for each head key [kv_lora, nope] and value [value_dim, kv_lora]; output [d_model, heads *
    value_dim]; norms [q_lora] and [kv_lora]."""

    q_a: QuantMatrix
    q_a_norm: Tensor
    q_b: QuantMatrix
    kv_a: QuantMatrix
    kv_a_norm: Tensor
    key: Sequence[QuantMatrix]
    value: Sequence[QuantMatrix]
    output: QuantMatrix


class MlaAttention:
    """x [n, d_model] -> [n, d_model]; stores its latents in the cache.

    With an indexer it decides what this layer and those behind it read; without one it reads what
    the layer before did.
    """

    reads_span = True

    def __init__(
        self,
        kernels: Kernels,
        shape: MlaShape,
        weights: MlaWeights,
        rope: RopeTables,
        indexer: tuple[IndexerWeights, int] | None = None,
    ) -> None:
        """indexer: its weights and top-k."""
        self._kernels = kernels
        self._shape = shape
        self._norms = weights.q_a_norm, weights.kv_a_norm
        self._rope = rope
        self._scale = (shape.nope + shape.rope) ** -0.5
        self._indexer = None
        down = [weights.q_a, weights.kv_a]
        if indexer is not None:
            index_weights, top_k = indexer
            self._indexer = Indexer(kernels, index_weights, top_k, rope)
            down += [index_weights.key, index_weights.head_weights]
        self._down = kernels.group(down)
        self._q_b = kernels.group([weights.q_b])
        self._keys = kernels.heads(weights.key)
        self._values = kernels.heads(weights.value)
        self._expanded = self._expanded_attention(weights)
        self._output = kernels.group([weights.output])

    def forward(
        self,
        x: Tensor,
        layer: int,
        kv: LatentCache,
        start: int,
        exact: bool,
        tap: Tap | None = None,
    ) -> Tensor:
        """Row i of x stands at position start + i."""
        projected = self._kernels.linear(x, self._down, exact)
        return self._attend(projected, layer, kv, start, start + len(x), exact, tap)

    def step(self, x: Tensor, layer: int, kv: LatentCache, place: StepPlace, exact: bool) -> Tensor:
        """`forward` of one token on a GPU, to be recorded.

        The kernels have x in 8 bit already, unless exact.
        """
        projected = self._kernels.linear(x, self._down, exact, quantised=True)
        return self._attend(projected, layer, kv, place.position, place.span, exact)

    def _attend(
        self,
        projected: Sequence[Tensor],
        layer: int,
        kv: LatentCache,
        start: int | Tensor,
        span: int,
        exact: bool,
        tap: Tap | None = None,
    ) -> Tensor:
        """projected: by the matrices of `_down`; span: positions that may be read."""
        kernels = self._kernels
        q_latent, latent, *index_inputs = projected
        count = len(q_latent)
        kernels.rms_norm(q_latent, self._norms[0], self._shape.eps, out=q_latent)
        self._store(latent, layer, kv, start)
        if self._indexer is not None:
            keys, head_weights = index_inputs
            self._indexer.store(keys, layer, kv, start)
            selected = self._indexer.select(q_latent, head_weights, layer, kv, start, span, exact)
            kv.selected = selected
            if tap is not None:
                if selected is None:
                    selected = self._indexer.all_positions(count, latent.device)
                tap(f"indexer_topk.{layer}", selected)
        queries = self._queries(q_latent, start, exact)
        latent = kv.latent[layer, :span]
        first_chunk = count >= mla_expanded.EXPANDED_TOKENS and start == 0
        if self._expanded is not None and first_chunk and kv.selected is None:
            values = self._expanded(queries, latent, exact)
        else:
            absorbed = self._absorb(queries, exact)
            mixed = kernels.latent_attention(
                absorbed, latent, self._shape.kv_lora, start, self._scale, kv.selected
            )
            values = kernels.per_head(mixed, self._values, exact)
        return kernels.linear(values.view(count, -1), self._output, exact)[0]

    def _store(self, projected: Tensor, layer: int, kv: LatentCache, start: int | Tensor) -> None:
        """projected [n, kv_lora + rope]: latents to be normed, keys to be rotated."""
        count, width = projected.shape
        kv_lora = self._shape.kv_lora
        kernels, rope = self._kernels, self._rope
        kernels.rope_pairs(projected.view(count, 1, width), rope.cos, rope.sin, start, kv_lora)
        latent = projected[:, :kv_lora].contiguous()
        kernels.rms_norm(latent, self._norms[1], self._shape.eps, out=latent)
        kv.store(kv.latent[layer], start, torch.cat((latent, projected[:, kv_lora:]), 1))

    def _queries(self, q_latent: Tensor, start: int | Tensor, exact: bool) -> Tensor:
        """[n, heads, nope + rope], rotated"""
        kernels, shape = self._kernels, self._shape
        q = kernels.linear(q_latent, self._q_b, exact)[0]
        q = q.view(len(q_latent), shape.heads, shape.nope + shape.rope)
        kernels.rope_pairs(q, self._rope.cos, self._rope.sin, start, shape.nope)
        return q

    def _absorb(self, q: Tensor, exact: bool) -> Tensor:
        """[n, heads, kv_lora + rope]"""
        nope = self._shape.nope
        absorbed = self._kernels.per_head(q[..., :nope].contiguous(), self._keys, exact)
        return torch.cat((absorbed, q[..., nope:]), -1)

    def _expanded_attention(self, weights: MlaWeights) -> ExpandedAttention | None:
        """Where heads are as `Kernels.attention` takes them, and their matrices side by side."""
        shape = self._shape
        head_dim = shape.nope + shape.rope
        key, value = QuantMatrix.stack(weights.key), QuantMatrix.stack(weights.value)
        if key is None or value is None or head_dim % HEAD_DIM_STEP or shape.value_dim > head_dim:
            return None
        return ExpandedAttention(self._kernels, shape.heads, key, value, self._scale)
