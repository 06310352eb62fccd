"""Products of some inputs with resident matrices."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from infer.kernels.cuda.dense import Dense
from infer.kernels.cuda.device import Device, at
from infer.kernels.cuda.formats import format_name, is_float
from infer.kernels.cuda.inputs import InputRows, Inputs
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.scratch import KernelBounds

MAX_GROUP_MATRICES = 8
TILE_TOKENS = 8
# From so many tokens on, dequantising a matrix once is cheaper than decoding it for every 8; one of
# floats is not decoded, but read once for every 8.
DENSE_TOKENS, DENSE_FLOAT_TOKENS = 32, 16
BLOCK_ROWS = 8


class _Group(ctypes.Structure):
    """`Group` of linear.cu."""

    _fields_ = (
        ("matrices", ctypes.c_void_p * MAX_GROUP_MATRICES),
        ("outputs", ctypes.c_void_p * MAX_GROUP_MATRICES),
        ("rows", ctypes.c_int * MAX_GROUP_MATRICES),
        ("end_block", ctypes.c_int * MAX_GROUP_MATRICES),
    )


_TYPES = (_Group, Inputs, ctypes.c_int, ctypes.c_void_p)
_FLOAT_TYPES = (ctypes.c_void_p, ctypes.c_void_p, Inputs, ctypes.c_int)


class _Launch:
    """Matrices of one type in a group: `members` are their places in it."""

    def __init__(self, name: str, matrices: Sequence[QuantMatrix], members: list[int]) -> None:
        self.name = name
        self.members = members
        self.on_floats = is_float(matrices[members[0]].type_id)
        self.arguments = _Group()
        self.blocks = 0
        for place, member in enumerate(members):
            self.arguments.matrices[place] = matrices[member].address
            self.arguments.rows[place] = matrices[member].rows
            self.blocks += -(-matrices[member].rows // BLOCK_ROWS)
            self.arguments.end_block[place] = self.blocks


class CudaGroup:
    """What `Linear.group` prepares: one launch for each type."""

    def __init__(self, matrices: tuple[QuantMatrix, ...]) -> None:
        self.matrices = matrices
        self.columns = matrices[0].columns
        by_name: dict[str, list[int]] = {}
        for index, matrix in enumerate(matrices):
            by_name.setdefault(format_name(matrix.type_id), []).append(index)
        self.launches = [_Launch(name, matrices, members) for name, members in by_name.items()]
        self.on_floats = all(launch.on_floats for launch in self.launches)


class Linear:
    def __init__(
        self, device: Device, inputs: InputRows, dense: Dense, bounds: KernelBounds
    ) -> None:
        self._device = device
        self._inputs = inputs
        self._dense = dense
        self._bounds = bounds

    def group(self, matrices: Sequence[QuantMatrix]) -> CudaGroup:
        assert 1 <= len(matrices) <= MAX_GROUP_MATRICES
        assert len({matrix.columns for matrix in matrices}) == 1
        assert matrices[0].columns <= self._bounds.columns
        return CudaGroup(tuple(matrices))

    def __call__(
        self,
        x: Tensor,
        group: CudaGroup,
        exact: bool,
        out: Sequence[Tensor] | None,
        quantised: bool,
        first_code: int = 0,
    ) -> Sequence[Tensor]:
        """first_code: which of the rows quantised before is that of x[0]."""
        count, columns = x.shape
        assert columns == group.columns
        assert count <= self._bounds.tokens
        values_at = at(x)
        if out is None:
            out = [torch.empty((count, matrix.rows), device=x.device) for matrix in group.matrices]
        if count >= DENSE_TOKENS and not exact:
            halved = x.to(torch.bfloat16)
            for matrix, target in zip(group.matrices, out, strict=True):
                self._dense.linear(halved, matrix, target)
            return out
        if count >= DENSE_FLOAT_TOKENS and group.on_floats:
            for matrix, target in zip(group.matrices, out, strict=True):
                self._dense.linear(x, matrix, target)
            return out
        if not (exact or quantised or group.on_floats):
            self._inputs.quantize(x)
        for first in range(0, count, TILE_TOKENS):
            tokens = min(TILE_TOKENS, count - first)
            values = values_at - 4 * first_code * columns
            tile = self._inputs.describe(columns, values, first_code + first, tokens)
            for launch in group.launches:
                run = self._run_floats if launch.on_floats else self._run_codes
                run(launch, group, tile, first, tokens, out, exact)
        return out

    def _run_floats(
        self,
        launch: _Launch,
        group: CudaGroup,
        tile: Inputs,
        first: int,
        tokens: int,
        out: Sequence[Tensor],
        exact: bool,  # noqa: ARG002 - the arithmetic is the same
    ) -> None:
        defines = {"FORMAT": launch.name, "TOKENS": instance_tokens(tokens)}
        function = self._device.function("linear_float.cu", "linear_float", _FLOAT_TYPES, **defines)
        for member in launch.members:
            matrix = group.matrices[member]
            target = at(out[member]) + 4 * first * matrix.rows
            function((matrix.rows, 1, 1), 128, matrix.address, target, tile, tokens)

    def _run_codes(
        self,
        launch: _Launch,
        group: CudaGroup,
        tile: Inputs,
        first: int,
        tokens: int,
        out: Sequence[Tensor],
        exact: bool,
    ) -> None:
        defines = {"FORMAT": launch.name, "TOKENS": instance_tokens(tokens)}
        if exact:
            defines["EXACT"] = 1
        function = self._device.function("linear.cu", "linear", _TYPES, **defines)
        for place, member in enumerate(launch.members):
            rows = group.matrices[member].rows
            launch.arguments.outputs[place] = at(out[member]) + 4 * first * rows
        grid_at = self._device.grid(launch.name)
        function((launch.blocks, 1, 1), 128, launch.arguments, tile, tokens, grid_at)


def instance_tokens(tokens: int) -> int:
    """Which instance of a kernel takes so many tokens: 1, 2, 4 or 8."""
    assert 1 <= tokens <= TILE_TOKENS
    return 1 << (tokens - 1).bit_length()
