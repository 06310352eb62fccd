"""The dense feed-forward block."""

from torch import Tensor

from infer.kernels.interface import Kernels
from infer.kernels.quant_matrix import QuantMatrix


class DenseFfn:
    """down(silu(gate x) * (up x)): x [n, width] -> [n, width]."""

    def __init__(
        self, kernels: Kernels, gate: QuantMatrix, up: QuantMatrix, down: QuantMatrix
    ) -> None:
        self._kernels = kernels
        self.matrices = (gate, up, down)

    def forward(self, x: Tensor, exact: bool) -> Tensor:
        return self._kernels.swiglu(x, *self.matrices, exact=exact)
