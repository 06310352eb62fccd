"""Grouped-query attention with a norm on each query and key head before RoPE."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from infer.blocks.moe import Tap
from infer.caches.kv_cache import KvCache
from infer.kernels.interface import Kernels
from infer.kernels.quant_matrix import QuantMatrix


@dataclass(frozen=True)
class GqaShape:
    heads: int
    kv_heads: int
    head_dim: int
    eps: float


@dataclass(frozen=True)
class RopeTables:
    """cos, sin [positions, rotated / 2], float32."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def build(
        cls, positions: int, rotated: int, theta: float, device: torch.device
    ) -> "RopeTables":
        """Angles position * theta^(-2i / rotated), computed in float64 (RoFormer, eq. 15)."""
        frequencies = theta ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
        angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
        return cls(angles.cos().float().to(device), angles.sin().float().to(device))


class StepPlace(NamedTuple):
    """Where a recorded step stands: position int32 [1] on the device, known when it runs; span:
    positions that it may read, of which those behind it are hidden."""

    position: Tensor
    span: int


class GqaAttention:
    """x [n, width] -> [n, width]; stores its keys and values in the cache."""

    reads_span = False  # its kernel reads what the position says

    def __init__(
        self,
        kernels: Kernels,
        shape: GqaShape,
        qkv: tuple[QuantMatrix, QuantMatrix, QuantMatrix],
        output: QuantMatrix,
        q_norm: Tensor,
        k_norm: Tensor,
        rope: RopeTables,
    ) -> None:
        self._kernels = kernels
        self._shape = shape
        self._qkv = kernels.group(qkv)
        self._output = kernels.group([output])
        self._q_norm, self._k_norm = q_norm, k_norm
        self._rope = rope
        self._scale = shape.head_dim**-0.5

    def forward(
        self,
        x: Tensor,
        layer: int,
        kv: KvCache,
        start: int,
        exact: bool,
        tap: Tap | None = None,  # noqa: ARG002 - there is nothing to see
    ) -> Tensor:
        """Row i of x stands at position start + i."""
        kernels, shape = self._kernels, self._shape
        token_count = x.shape[0]
        q, k, v = kernels.linear(x, self._qkv, exact)
        q = q.view(token_count, shape.heads, shape.head_dim)
        k = k.view(token_count, shape.kv_heads, shape.head_dim)
        v = v.view(token_count, shape.kv_heads, shape.head_dim)
        kernels.rms_norm(q, self._q_norm, shape.eps, out=q)
        kernels.rms_norm(k, self._k_norm, shape.eps, out=k)
        kernels.rope(q, self._rope.cos, self._rope.sin, start)
        kernels.rope(k, self._rope.cos, self._rope.sin, start)
        kv.store(layer, start, k, v)
        mixed = kernels.attention(q, kv.keys[layer], kv.values[layer], start, self._scale)
        return kernels.linear(mixed.reshape(token_count, -1), self._output, exact)[0]

    def step(self, x: Tensor, layer: int, kv: KvCache, place: StepPlace, exact: bool) -> Tensor:
        """`forward` of one token on a GPU, to be recorded.

        The kernels have x in 8 bit already, unless exact.
        """
        kernels, shape, position = self._kernels, self._shape, place.position
        q, k, v = kernels.linear(x, self._qkv, exact, quantised=True)
        heads = (
            q.view(1, shape.heads, shape.head_dim),
            k.view(1, shape.kv_heads, shape.head_dim),
            v.view(1, shape.kv_heads, shape.head_dim),
        )
        norms, tables = (self._q_norm, self._k_norm), (self._rope.cos, self._rope.sin)
        keys, values = kv.keys[layer], kv.values[layer]
        kernels.prepare_heads(heads, norms, shape.eps, tables, (keys, values), position)
        mixed = kernels.attention(heads[0], keys, values, position, self._scale, quantise=not exact)
        return kernels.linear(mixed.view(1, -1), self._output, exact, quantised=True)[0]
