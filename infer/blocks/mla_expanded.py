"""Latent attention over keys and values of every head, for the first chunk of a prompt.

Expanding n latents takes as many products as absorbing n queries and outputs does, and scores are
cheaper: of nope + rope numbers instead of kv_lora + rope. With GLM-5.2's widths that pays from some
hundred tokens on, as long as nothing stands before them that would have to be expanded again (two
cores, 128 and 256 tokens: 94 and 152 ms a layer, absorbed 71 and 183).
"""

import torch
from torch import Tensor

from infer.kernels.interface import Kernels
from infer.kernels.quant_matrix import QuantMatrix
from shared.quants import TensorType

EXPANDED_TOKENS = 256
# Heads' widths that `Kernels.attention` takes on every device are multiples of this.
HEAD_DIM_STEP = 32


class ExpandedAttention:
    """key [heads * kv_lora, nope], value [heads * value_dim, kv_lora]: all heads' as one."""

    def __init__(
        self, kernels: Kernels, heads: int, key: QuantMatrix, value: QuantMatrix, scale: float
    ) -> None:
        self._kernels = kernels
        self._heads = heads
        self._key = key
        self._values = kernels.group([value])
        self._scale = scale

    def __call__(self, q: Tensor, latent: Tensor, exact: bool) -> Tensor:
        """q [n, heads, nope + rope] at positions 0 .. n - 1, latent [n, kv_lora + rope] of theirs
        from the cache -> [n, heads, value_dim].

        Beside the results: keys and values of n tokens in the cache's type, and in float32 one of
        them and a key matrix.
        """
        n, heads, _ = q.shape
        nope = self._key.columns
        kv_lora = self._key.rows // heads
        compressed = latent[:, :kv_lora].float().contiguous()
        keys = torch.empty(q.shape, dtype=latent.dtype, device=q.device)
        keys[..., :nope] = self._expand_keys(compressed, exact).view(n, heads, nope)
        keys[..., nope:] = latent[:, None, kv_lora:]
        expanded = self._kernels.linear(compressed, self._values, exact)[0].view(n, heads, -1)
        value_dim = expanded.shape[2]
        values = torch.zeros_like(keys)
        values[..., :value_dim] = expanded
        mixed = self._kernels.attention(q, keys, values, 0, self._scale)
        return mixed[..., :value_dim].contiguous()

    def _expand_keys(self, compressed: Tensor, exact: bool) -> Tensor:
        """[n, heads * nope]. The matrices lie transposed; they leave their blocks for a moment."""
        key, heads = self._key, self._heads
        ids = torch.arange(key.rows, device=compressed.device)
        dense = self._kernels.embed(key, ids).view(heads, -1, key.columns)
        turned = dense.transpose(1, 2).contiguous().view(heads * key.columns, -1)
        rows, columns = turned.shape
        matrix = QuantMatrix(int(TensorType.F32), rows, columns, turned.data_ptr(), turned)
        return self._kernels.linear(compressed, self._kernels.group([matrix]), exact)[0]
