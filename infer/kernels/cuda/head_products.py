"""Products of each head's input with a matrix of its own.

For a few tokens by the experts' kernel: a head of a token is a pair, and its matrix the expert. For
more the matrices are dequantised, which takes their memory for a moment: 64 heads of 512 x 256
weights are 34 MB.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.kernels.cuda.dense import Dense
from infer.kernels.cuda.device import Device, at
from infer.kernels.cuda.experts import DOWN_TYPES, DOWN_WARPS, OUTPUT_ROWS
from infer.kernels.cuda.formats import format_name, is_float
from infer.kernels.cuda.inputs import InputRows
from infer.kernels.cuda.tiles import Tiles
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.scratch import KernelBounds

FEW_TOKENS = 8
_ALIGNMENT = 4  # of the addresses that the kernel takes


class CudaHeadMatrices:
    """What `HeadProducts.group` prepares; `parts` are all of them as one where they lie so.

    addresses: int64 [FEW_TOKENS * heads] on the device, None where the kernel does not take them.
    """

    def __init__(self, matrices: tuple[QuantMatrix, ...], ids: Tensor) -> None:
        first = matrices[0]
        self.matrices = matrices
        self.shape = first.rows, first.columns
        stack = QuantMatrix.stack(matrices)
        self.parts = list(matrices) if stack is None else [stack]
        self.ids = ids[: self.parts[0].rows]
        places = torch.tensor([m.address for m in matrices], dtype=torch.int64)
        aligned = not (places % _ALIGNMENT).any()
        self.addresses = places.repeat(FEW_TOKENS).to(ids.device) if aligned else None


class HeadProducts:
    def __init__(self, device: Device, dense: Dense, bounds: KernelBounds) -> None:
        self._device = device
        self._dense = dense
        self._ids = torch.arange(1, device=device.device)
        latent = bounds.latent
        rows, columns = (FEW_TOKENS * latent.heads, latent.head_columns) if latent else (1, 1)
        self._inputs = InputRows(device, [(rows, columns)])

    def group(self, matrices: Sequence[QuantMatrix]) -> CudaHeadMatrices:
        assert len({(m.type_id, m.rows, m.columns) for m in matrices}) == 1
        rows = len(matrices) * matrices[0].rows
        if rows > len(self._ids):
            self._ids = torch.arange(rows, device=self._ids.device)
        return CudaHeadMatrices(tuple(matrices), self._ids)

    def __call__(self, x: Tensor, group: CudaHeadMatrices, exact: bool) -> Tensor:
        """x [n, heads, columns] -> [n, heads, rows]; for many tokens in float32 always."""
        if len(x) <= FEW_TOKENS and group.addresses is not None:
            return self._few(x, group, group.addresses, exact)
        return self._many(x, group)

    def _few(self, x: Tensor, group: CudaHeadMatrices, addresses: Tensor, exact: bool) -> Tensor:
        n, heads, columns = x.shape
        rows, _ = group.shape
        type_id = group.matrices[0].type_id
        name = format_name(type_id)
        if not exact and not is_float(type_id):
            self._inputs.quantize(x.view(n * heads, columns))
        out = torch.empty((n, heads, rows), device=x.device)
        exactly = {"EXACT": 1} if exact else {}
        function = self._device.function(
            *("experts.cu", "down", DOWN_TYPES),
            FORMAT=name,
            WARPS=DOWN_WARPS,
            TOKENS=1,
            **exactly,
        )
        function(
            (-(-rows // OUTPUT_ROWS), n * heads, 1),
            32 * DOWN_WARPS,
            addresses.data_ptr(),
            Tiles(None, None, None, None, 1),
            self._inputs.describe(columns, at(x), rows=n * heads),
            rows,
            at(out),
            self._device.grid(name),
        )
        return out

    def _many(self, x: Tensor, group: CudaHeadMatrices) -> Tensor:
        heads = len(group.matrices)
        rows, columns = group.shape
        dense = torch.empty((heads * rows, columns), device=x.device)
        step = group.parts[0].rows
        for number, part in enumerate(group.parts):
            self._dense.embed(part, group.ids, dense[number * step : (number + 1) * step])
        weights = dense.view(heads, rows, columns)
        return torch.bmm(x.transpose(0, 1), weights.transpose(1, 2)).transpose(0, 1).contiguous()
