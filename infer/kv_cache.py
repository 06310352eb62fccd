"""Keys and values of every layer for the positions seen so far."""

import torch
from torch import Tensor

from shared.errors import RequestError


class KvCache:
    """Room for `context` positions, allocated at once (the system backs pages as they fill).

    keys, values: for each layer [context, kv_heads, head_dim]; float32 when exact, else 16 bit:
    bfloat16 on a GPU, whose tensor cores take it, float16 on a CPU, which converts it as fast.
    """

    def __init__(
        self,
        n_layers: int,
        context: int,
        kv_heads: int,
        head_dim: int,
        exact: bool,
        device: torch.device,
    ) -> None:
        short = torch.bfloat16 if device.type == "cuda" else torch.float16
        dtype = torch.float32 if exact else short
        shape = (n_layers, context, kv_heads, head_dim)
        try:
            self.keys: Tensor = torch.empty(shape, dtype=dtype, device=device)
            self.values: Tensor = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            size_bytes = 2 * n_layers * context * kv_heads * head_dim * dtype.itemsize
            raise RequestError(
                f"a KV cache for {context} tokens takes {size_bytes / 2**30:.1f} GiB,"
                " which cannot be had",
                "give a smaller --ctx",
            ) from error
        self.context = context
        self.length = 0

    @property
    def token_bytes(self) -> int:
        """What one token takes in all layers."""
        n_layers, _, kv_heads, head_dim = self.keys.shape
        return 2 * n_layers * kv_heads * head_dim * self.keys.dtype.itemsize

    def store(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """keys, values [n, kv_heads, head_dim] at positions start .. start + n."""
        stop = start + keys.shape[0]
        self.keys[layer, start:stop] = keys
        self.values[layer, start:stop] = values

    def make_room(self, token_count: int) -> None:
        """RequestError unless so many tokens more fit; nothing is ever shifted out."""
        if self.length + token_count > self.context:
            raise RequestError(
                f"{self.length + token_count} tokens do not fit a context of {self.context}",
                "give a shorter text, a larger --ctx if the model has it, or /reset a chat",
            )

    def truncate(self, length: int) -> None:
        """Forget what lies behind the first `length` positions."""
        assert 0 <= length <= self.length
        self.length = length
