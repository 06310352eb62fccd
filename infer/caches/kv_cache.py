"""Keys and values of every layer for the positions seen so far."""

from dataclasses import dataclass

import torch
from torch import Tensor

from infer.caches.cache import Cache, cache_dtype, cache_memory


@dataclass(frozen=True)
class KvShape:
    """A key and a value for each layer and kv head."""

    n_layers: int
    kv_heads: int
    head_dim: int

    @property
    def token_values(self) -> int:
        return 2 * self.n_layers * self.kv_heads * self.head_dim

    def allocate(self, context: int, exact: bool, device: torch.device) -> "KvCache":
        return KvCache(self.n_layers, context, self.kv_heads, self.head_dim, exact, device)


class KvCache(Cache):
    """keys, values: for each layer [context, kv_heads, head_dim], of type `cache_dtype`."""

    def __init__(
        self,
        n_layers: int,
        context: int,
        kv_heads: int,
        head_dim: int,
        exact: bool,
        device: torch.device,
    ) -> None:
        super().__init__(context)
        shape = (n_layers, context, kv_heads, head_dim)
        self.keys, self.values = cache_memory(
            [shape, shape], context, cache_dtype(exact, device), device
        )

    @property
    def token_bytes(self) -> int:
        """What one token takes in all layers."""
        n_layers, _, kv_heads, head_dim = self.keys.shape
        return 2 * n_layers * kv_heads * head_dim * self.keys.dtype.itemsize

    def planes(self) -> dict[str, Tensor]:
        return {"keys": self.keys, "values": self.values}

    def store(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """keys, values [n, kv_heads, head_dim] at positions start .. start + n."""
        stop = start + keys.shape[0]
        self.keys[layer, start:stop] = keys
        self.values[layer, start:stop] = values
