"""What a family builds a model from."""

from dataclasses import dataclass

from infer.blocks.moe import ExpertSource
from infer.kernels.interface import Kernels
from infer.weights import Weights
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex


@dataclass(frozen=True)
class Parts:
    """context: positions that will be used at the most; RoPE tables are made for so many."""

    index: GgufIndex
    experts: ExpertIndex
    weights: Weights
    kernels: Kernels
    source: ExpertSource
    context: int
