"""Gated blocks of resident matrices: the shared expert, dense layers."""

import ctypes

import torch
from torch import Tensor

from infer.kernels.cuda.dense import Dense
from infer.kernels.cuda.device import Device, at
from infer.kernels.cuda.formats import is_float
from infer.kernels.cuda.inputs import NO_CODES, InputRows, QuantisedRows
from infer.kernels.cuda.linear import TILE_TOKENS, CudaGroup, Linear
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.scratch import KernelBounds

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


class Resident:
    """down(silu(gate x) * (up x)) for up to TILE_TOKENS tokens at a time."""

    def __init__(
        self,
        device: Device,
        inputs: InputRows,
        linear: Linear,
        dense: Dense,
        bounds: KernelBounds,
    ) -> None:
        self._inputs = inputs
        self._linear = linear
        self._products = torch.empty((2, TILE_TOKENS * bounds.columns), device=device.device)
        self._hidden = InputRows(device, [(TILE_TOKENS, bounds.columns)], values=True)
        self._down = Linear(device, self._hidden, dense, bounds)
        self._groups: dict[tuple[QuantMatrix, ...], tuple[CudaGroup, CudaGroup]] = {}
        self._silu_rows = device.function(
            "rows.cu", "silu_rows", (_POINTER, _POINTER, _INT, _POINTER, QuantisedRows)
        )

    def __call__(
        self,
        x: Tensor,
        matrices: tuple[QuantMatrix, QuantMatrix, QuantMatrix],
        exact: bool,
        quantised: bool,
        out: Tensor,
    ) -> None:
        gate_up, down = self._group(matrices)
        if not (exact or quantised or gate_up.on_floats):
            self._inputs.quantize(x)
        for first in range(0, len(x), TILE_TOKENS):
            rows = slice(first, first + TILE_TOKENS)
            self._tile(x[rows], gate_up, down, exact, first, out[rows])

    def _tile(
        self,
        x: Tensor,
        gate_up: CudaGroup,
        down: CudaGroup,
        exact: bool,
        first: int,
        out: Tensor,
    ) -> None:
        count, width = len(x), gate_up.matrices[0].rows
        gate, up = (part[: count * width].view(count, width) for part in self._products)
        self._linear(x, gate_up, exact, [gate, up], True, first)
        hidden = self._hidden.values[: count * width].view(count, width)
        on_floats = exact or is_float(down.matrices[0].type_id)
        codes = NO_CODES if on_floats else self._hidden.target(count, width)
        grid = (-(-width // 256), count, 1)
        self._silu_rows(grid, 256, at(gate), at(up), width, at(hidden), codes)
        self._down(hidden, down, exact, [out], quantised=True)

    def _group(self, matrices: tuple[QuantMatrix, ...]) -> tuple[CudaGroup, CudaGroup]:
        kept = self._groups.get(matrices)
        if kept is None:
            gate, up, down = matrices
            kept = self._groups[matrices] = (
                self._linear.group([gate, up]),
                self._linear.group([down]),
            )
        return kept
