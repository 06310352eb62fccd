"""Activations as the products read them: floats as they are, and 8-bit copies beside them."""

import ctypes

import torch
from torch import Tensor

from infer.kernels.cuda.device import Device

LANES = 16
_GROUP_COLUMNS = 32 * LANES
_CODES_BYTES, _MARKS_BYTES = 32 * LANES, 8 * LANES  # of a group


class Inputs(ctypes.Structure):
    """`Inputs` of inputs.cuh."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("marks", ctypes.c_void_p),
        ("columns", ctypes.c_int),
        ("groups", ctypes.c_int),
    )


class QuantisedRows(ctypes.Structure):
    """`QuantisedRows` of inputs.cuh."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("marks", ctypes.c_void_p),
        ("groups", ctypes.c_int),
    )


# Where no 8-bit copy is wanted.
NO_CODES = QuantisedRows(None, None, 0)


def _groups(columns: int) -> int:
    return -(-columns // _GROUP_COLUMNS)


class InputRows:
    """Room for rows in 8 bit and, where `values` is asked for, as floats; reserved once."""

    def __init__(self, device: Device, shapes: list[tuple[int, int]], values: bool = False) -> None:
        """For any of the `shapes` (rows, columns) at a time."""
        self._groups = max(rows * _groups(columns) for rows, columns in shapes)
        self._codes = torch.zeros(
            self._groups * _CODES_BYTES, dtype=torch.uint8, device=device.device
        )
        self._marks = torch.zeros(
            self._groups * _MARKS_BYTES, dtype=torch.uint8, device=device.device
        )
        size = max(rows * columns for rows, columns in shapes) if values else 0
        self.values = torch.empty(size, dtype=torch.float32, device=device.device)
        self._quantize = device.function(
            "rows.cu", "quantize_rows", (ctypes.c_void_p, ctypes.c_int, QuantisedRows)
        )

    def describe(
        self, columns: int, values_at: int | None = None, first: int = 0, rows: int = 1
    ) -> Inputs:
        """Rows from `first` on; row 0 has its floats at `values_at`, by default `self.values`."""
        groups = _groups(columns)
        assert (first + rows) * groups <= self._groups
        values = self.values.data_ptr() if values_at is None else values_at
        return Inputs(
            values + 4 * first * columns,
            self._codes.data_ptr() + first * groups * _CODES_BYTES,
            self._marks.data_ptr() + first * groups * _MARKS_BYTES,
            columns,
            groups,
        )

    def target(self, rows: int, columns: int) -> QuantisedRows:
        groups = _groups(columns)
        assert rows * groups <= self._groups
        return QuantisedRows(self._codes.data_ptr(), self._marks.data_ptr(), groups)

    def quantize(self, x: Tensor) -> None:
        """Keep 8-bit copies of x [rows, columns]."""
        rows, columns = x.shape
        blocks = -(-columns // (32 * 8))
        self._quantize((blocks, rows, 1), 256, x.data_ptr(), columns, self.target(rows, columns))
