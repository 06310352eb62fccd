"""What every cache of a sequence has in common, whatever its layers keep of a token."""

from typing import Protocol

import torch
from torch import Tensor

from shared.errors import RequestError
from shared.sizes import size_text


class Cache:
    """Room for `context` positions, of which the first `length` are filled."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.length = 0

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

    def planes(self) -> dict[str, Tensor]:
        """All that is kept, by name: tensors [layers, positions, ...], to be saved and restored."""
        raise NotImplementedError


class CacheShape(Protocol):
    """What a family keeps of a token."""

    @property
    def token_values(self) -> int:
        """Numbers a token takes in all layers: two bytes each, four under --exact."""

    def allocate(self, context: int, exact: bool, device: torch.device) -> Cache:
        """An empty cache; RequestError where the memory cannot be had."""


def cache_dtype(exact: bool, device: torch.device) -> torch.dtype:
    """float32 when exact, else 16 bit: bfloat16 on a GPU, whose tensor cores take it, float16 on a
    CPU, which converts it as fast."""
    if exact:
        return torch.float32
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def cache_memory(
    shapes: list[tuple[int, ...]], context: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """A tensor for each shape, allocated at once (the system backs pages as they fill)."""
    try:
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    except RuntimeError as error:
        size_bytes = sum(torch.Size(shape).numel() for shape in shapes) * dtype.itemsize
        raise RequestError(
            f"a KV cache for {context} tokens takes {size_text(size_bytes)}, which cannot be had",
            "give a smaller --ctx",
        ) from error
