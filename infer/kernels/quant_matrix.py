"""A quantised matrix where it lies in memory: what every kernel takes as weights."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shared.quants import row_bytes


@dataclass(frozen=True, slots=True)
class QuantMatrix:
    """A row-major matrix of GGML blocks at a memory address.

    `rows` is the number of outputs and `columns` the number of inputs, so y = W x. The bytes may be
    mapped read-only: kernels never write them. `keepalive` is whatever owns the mapping.
    """

    type_id: int
    rows: int
    columns: int
    address: int
    keepalive: object = field(default=None, repr=False, compare=False)

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.type_id, self.columns)

    @classmethod
    def over(cls, type_id: int, columns: int, data: np.ndarray) -> "QuantMatrix":
        """The matrix whose bytes are the C-contiguous array `data`; it is kept alive, not copied.

        MalformedModel where a row is not made of whole blocks.
        """
        assert data.flags.c_contiguous
        rows, rest = divmod(data.nbytes, row_bytes(type_id, columns))
        assert rest == 0, "the array does not end at a row"
        return cls(type_id, rows, columns, data.ctypes.data, data)

    def part(self, first_row: int, rows: int) -> "QuantMatrix":
        """The matrix of some of the rows, in place."""
        assert 0 <= first_row <= self.rows - rows
        address = self.address + first_row * self.row_bytes
        return QuantMatrix(self.type_id, rows, self.columns, address, self.keepalive)

    @classmethod
    def stack(cls, matrices: Sequence["QuantMatrix"]) -> "QuantMatrix | None":
        """Matrices of one type and shape as one, where each lies behind the one before it."""
        first = matrices[0]
        step_bytes = first.rows * first.row_bytes
        if any(m.address != first.address + i * step_bytes for i, m in enumerate(matrices)):
            return None
        rows = len(matrices) * first.rows
        return cls(first.type_id, rows, first.columns, first.address, first.keepalive)

    def blocks(self) -> np.ndarray:
        """uint8 [rows, row_bytes]: the bytes in place, not to be written."""
        buffer = (ctypes.c_uint8 * (self.rows * self.row_bytes)).from_address(self.address)
        buffer.keepalive = self.keepalive
        return np.frombuffer(buffer, np.uint8).reshape(self.rows, self.row_bytes)
