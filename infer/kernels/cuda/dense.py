"""Dequantised weights: rows for the embedding, and products with many tokens on tensor cores."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from infer.kernels.cuda.device import Device
from infer.kernels.cuda.formats import format_name
from infer.kernels.quant_matrix import QuantMatrix

TILE_WEIGHTS = 16 * 2**20

_TYPES = (
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
)


class Dense:
    """Holds one tile of TILE_WEIGHTS weights in bfloat16 (32 MB)."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tile = torch.empty(TILE_WEIGHTS, dtype=torch.bfloat16, device=device.device)

    def embed(self, matrix: QuantMatrix, ids: Tensor, out: Tensor | None) -> Tensor:
        if out is None:
            out = torch.empty((len(ids), matrix.columns), device=self._device.device)
        assert ids.dtype is torch.int64
        self._expand(matrix, out, ids.data_ptr(), 0)
        return out

    def linear(self, x: Tensor, matrix: QuantMatrix, out: Tensor) -> None:
        """out [n, rows] = x W^T for x [n, columns] in bfloat16, or in float32 and then all of it;
        sums in float32, in cuBLAS's order."""
        tile = self._tile.view(x.dtype)
        tile_rows = len(tile) // matrix.columns
        assert tile_rows > 0
        for first in range(0, matrix.rows, tile_rows):
            rows = min(tile_rows, matrix.rows - first)
            weights = tile[: rows * matrix.columns].view(rows, matrix.columns)
            self._expand(matrix, weights, None, first)
            product = torch.mm(x, weights.T, out_dtype=torch.float32)
            out[:, first : first + rows] = product

    def _expand(self, matrix: QuantMatrix, out: Tensor, ids_at: int | None, first: int) -> None:
        name = format_name(matrix.type_id)
        rows, columns = out.shape
        function = self._function(name, out.dtype is torch.bfloat16)
        blocks = -(-rows * -(-columns // 32) // 256)
        function(
            (blocks, 1, 1),
            256,
            matrix.address,
            ids_at,
            first,
            rows,
            columns,
            out.data_ptr(),
            self._device.grid(name),
        )

    def _function(self, name: str, halved: bool) -> Callable[..., None]:
        defines = {"HALF_OUTPUT": 1} if halved else {}
        return self._device.function("dequantize.cu", "dequantize", _TYPES, FORMAT=name, **defines)
