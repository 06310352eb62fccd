"""Bounds that kernels are built for, and the memory that follows from them."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor, float32

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class LatentBounds:
    """The largest calls of latent attention and its indexer; see `interface.LatentKernels`."""

    heads: int
    width: int  # numbers a token keeps in a layer: latent and rotated key
    head_columns: int  # the widest input of `per_head`, a head
    index_heads: int
    index_dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class KernelBounds:
    """The largest call that a set of kernels will see; all scratch memory is reserved for it."""

    tokens: int  # rows of x in one call
    columns: int  # weights in a row of any matrix but the experts' down
    expert_columns: int  # weights in a row of an expert's down: its feed-forward width
    pairs: int  # (token, expert) pairs in one call
    experts: int  # experts in one batch, and in the router's choice
    heads: int
    head_dim: int
    context: int  # positions in a cache
    latent: LatentBounds | None = None  # for models that have such attention

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            assert value is None or isinstance(value, LatentBounds) or value >= 1, name


class Scratch:
    """Memory for intermediate results, reserved up front; the system provides it when touched."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []

    def reserve(self, size_bytes: int) -> int:
        """The aligned address of a new stretch, valid while this object lives."""
        block = np.empty(size_bytes + _ALIGNMENT, np.uint8)
        self._blocks.append(block)
        return (block.ctypes.data + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


def address_of(x: Tensor) -> int:
    """The address of a contiguous float32 CPU tensor."""
    assert x.dtype is float32
    assert x.is_contiguous()
    return x.data_ptr()
