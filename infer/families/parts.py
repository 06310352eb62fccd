"""What a family builds a model from."""

from collections.abc import Callable
from dataclasses import dataclass

from infer.blocks.moe import ExpertSource
from infer.kernels.interface import Kernels
from infer.resident.weights import Weights
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex


@dataclass(frozen=True)
class Parts:
    """context: positions that will be used at the most; RoPE tables are made for so many.

    mtp_indexer: whether the MTP block reads the positions that an indexer of its own selects.
    """

    index: GgufIndex
    experts: ExpertIndex
    weights: Weights
    kernels: Kernels
    source: ExpertSource
    context: int
    mtp_indexer: bool = False


# Puts something that watches in the place of some parts.
Instrument = Callable[[Parts], Parts]
