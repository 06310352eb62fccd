"""The compact cache of multi-head latent attention: one latent a token, whatever the heads.

A layer keeps of a token its normed latent and its rotated key, which all heads share:

    latent [context, kv_lora + rope]      [latent kv_lora | rope]

and, where the layer has an index of its own, the key that the indexer scores:

    index_keys [context, index_dim]
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from infer.caches.cache import Cache, cache_dtype, cache_memory


@dataclass(frozen=True)
class LatentShape:
    """`index_layers` are those with an index of their own."""

    n_layers: int
    kv_lora: int
    rope: int
    index_dim: int
    index_layers: tuple[int, ...]

    @property
    def token_values(self) -> int:
        return self.n_layers * (self.kv_lora + self.rope) + len(self.index_layers) * self.index_dim

    def allocate(self, context: int, exact: bool, device: torch.device) -> "LatentCache":
        return LatentCache(self, context, exact, device)


class LatentCache(Cache):
    """latent: for each layer; see above.

    selected: the positions that attention reads in the pass under way, as `Kernels.select` gives
    them, or None for all. A layer with an index sets it; those behind it without one read it.
    """

    def __init__(self, shape: LatentShape, context: int, exact: bool, device: torch.device) -> None:
        super().__init__(context)
        self._rows = {layer: row for row, layer in enumerate(shape.index_layers)}
        self.latent, self._index_keys = cache_memory(
            [
                (shape.n_layers, context, shape.kv_lora + shape.rope),
                (len(shape.index_layers), context, shape.index_dim),
            ],
            context,
            cache_dtype(exact, device),
            device,
        )
        self.selected: Tensor | None = None
        if device.type == "cuda":
            # A recorded step reads beyond what is stored, and hides it: there must be numbers.
            self.latent.zero_()
            self._index_keys.zero_()

    def index_keys(self, layer: int) -> Tensor:
        """[context, index_dim] of a layer that owns an index."""
        return self._index_keys[self._rows[layer]]

    def store(self, plane: Tensor, start: int | Tensor, rows: Tensor) -> None:
        """rows [n, width] into a layer's plane at positions start .. start + n; `start` may be an
        int32 tensor [1] on the device for one of them."""
        if isinstance(start, Tensor):
            plane.index_copy_(0, start.long(), rows.to(plane.dtype))
        else:
            plane[start : start + len(rows)] = rows

    def planes(self) -> dict[str, Tensor]:
        return {"latent": self.latent, "index_keys": self._index_keys}

    @property
    def token_bytes(self) -> int:
        """What one token takes in all layers."""
        size = sum(x[:, 0].numel() for x in (self.latent, self._index_keys))
        return size * self.latent.dtype.itemsize
