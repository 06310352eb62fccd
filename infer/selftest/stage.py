"""Random weights on the device under test, and the phases that a cache goes through."""

from collections.abc import Iterator

import torch
from torch import Tensor

from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.scratch import KernelBounds, LatentBounds
from shared.quants import TensorType

WIDTH, CONTEXT, LONGEST = 256, 512, 260
# Name and tokens. The first is long enough for what only first chunks get (expanded attention). The
# third reaches from position 261 to 460, past the ends of blocks in which kernels take positions
# (64 and 128; the first passed 256), the last stands behind them.
PHASES = (("prefill", LONGEST), ("decode", 1), ("long chunk", 200), ("decode after it", 1))
TOKENS = sum(count for _, count in PHASES)

BOUNDS = KernelBounds(
    tokens=LONGEST,
    columns=512,
    expert_columns=WIDTH,
    pairs=LONGEST,
    experts=1,
    heads=8,
    head_dim=64,
    context=CONTEXT,
    latent=LatentBounds(
        heads=8, width=160, head_columns=128, index_heads=8, index_dim=64, top_k=40
    ),
)


class Stage:
    """Draws random numbers on the CPU, the same ones for every device, and copies them to it."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """float32 on the CPU."""
        return torch.randn(*shape, generator=self._generator)

    def matrix(self, rows: int, columns: int) -> tuple[QuantMatrix, Tensor]:
        """On the device, and in float64 on the CPU; outputs are about as large as inputs."""
        dense = self.normal(rows, columns) * columns**-0.5
        there = dense.to(self.device)
        kind = int(TensorType.F32)
        return QuantMatrix(kind, rows, columns, there.data_ptr(), there), dense.double()

    def norm(self, size: int) -> tuple[Tensor, Tensor]:
        """A norm's weight, there and here."""
        weight = 1 + 0.1 * self.normal(size)
        return weight.to(self.device), weight.double()

    def inputs(self) -> Tensor:
        """float32 [TOKENS, WIDTH] on the CPU."""
        return self.normal(TOKENS, WIDTH)


def phases() -> Iterator[tuple[str, int, int]]:
    """Name, first position, position behind the last."""
    start = 0
    for name, count in PHASES:
        yield name, start, start + count
        start += count
