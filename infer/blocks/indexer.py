"""The indexer of sparse attention: which earlier positions a token looks at.

A few narrow heads score every position (DeepSeek-V3.2, section 2.1). Queries come from the normed
query latent, keys and the heads' weights from the layer's normed input; of queries and keys the
first numbers are rotated, neighbours against each other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from infer.blocks.attention import RopeTables
from infer.caches.latent_cache import LatentCache
from infer.kernels.interface import Kernels
from infer.kernels.quant_matrix import QuantMatrix

KEY_NORM_EPS = 1e-6  # no key of the file's says it


@dataclass(frozen=True)
class IndexerWeights:
    """q [heads * width, q_lora], key [width, d_model], head_weights [heads, d_model]; the norm of
    the keys has a weight and a bias [width]."""

    q: QuantMatrix
    key: QuantMatrix
    head_weights: QuantMatrix
    norm_weight: Tensor
    norm_bias: Tensor


class Indexer:
    """The positive factors that models put on scores (of the width and the number of heads) are
    left out: they change no selection."""

    def __init__(
        self, kernels: Kernels, weights: IndexerWeights, top_k: int, rope: RopeTables
    ) -> None:
        self.top_k = top_k
        self._kernels = kernels
        self._queries = kernels.group([weights.q])
        self._norm = weights.norm_weight, weights.norm_bias
        self._rope = rope

    def store(self, keys: Tensor, layer: int, kv: LatentCache, start: int | Tensor) -> None:
        """keys [n, width] as projected, of the tokens from position `start` on."""
        count, width = keys.shape
        keys = layer_norm(keys, (width,), *self._norm, KEY_NORM_EPS)
        self._kernels.rope_pairs(keys.view(count, 1, width), self._rope.cos, self._rope.sin, start)
        kv.store(kv.index_keys(layer), start, keys)

    def select(
        self,
        q_latent: Tensor,
        head_weights: Tensor,
        layer: int,
        kv: LatentCache,
        start: int | Tensor,
        span: int,
        exact: bool,
    ) -> Tensor | None:
        """As `Kernels.select`, once the keys are stored; None where all positions are read.

        q_latent [n, q_lora], head_weights [n, heads]. span: positions that may be read.
        """
        count, heads = head_weights.shape
        if span <= self.top_k:
            return None
        keys = kv.index_keys(layer)[:span]
        q = self._kernels.linear(q_latent, self._queries, exact)[0]
        q = q.view(count, heads, keys.shape[1])
        self._kernels.rope_pairs(q, self._rope.cos, self._rope.sin, start)
        return self._kernels.select(q, head_weights, keys, start, self.top_k)

    def all_positions(self, count: int, device: torch.device) -> Tensor:
        """What `select` would have named where it has None to say."""
        return torch.arange(self.top_k, dtype=torch.int32, device=device).repeat(count, 1)
