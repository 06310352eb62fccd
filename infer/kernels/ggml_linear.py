"""Products of some inputs with a group of matrices, in one parallel region."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from infer.kernels.compiled_matmul import Task
from infer.kernels.ggml_activations import Activations
from infer.kernels.ggml_library import GgmlLibrary
from infer.kernels.matmul_tasks import Matmul, activation_type, item_rows, task_template
from infer.kernels.pieces import piece_rows
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.scratch import KernelBounds, Scratch, address_of
from infer.kernels.tiled_matmul import TiledMatmul
from shared.quants import TensorType

MAX_GROUP_MATRICES = 8


class _Variant:
    """A group's tasks in one arithmetic; `kinds` are the formats of their inputs."""

    def __init__(self, tasks: Sequence[Task], kinds: Sequence[int]) -> None:
        self._array = (Task * len(tasks))(*tasks)
        self.at = ctypes.addressof(self._array)
        self.tasks = list(self._array)
        self.on_floats = [task for task in self.tasks if task.inputs == 0]
        self.conversions = sorted({*kinds} - {int(TensorType.F32)})
        self.items = 0
        self._inputs = 0

    def plan(self, inputs: int, threads: int) -> None:
        """Number the items for this many inputs."""
        if inputs == self._inputs:
            return
        items, weights = 0, sum(task.rows * task.columns for task in self.tasks)
        for task in self.tasks:
            task.count = inputs
            task.item_rows = item_rows(task.columns, inputs, weights, threads)
            task.first_item = items
            items += -(-task.rows // task.item_rows)
            task.end_item = items
        # Last, so that a plan cut short by Ctrl-C is made again.
        self.items, self._inputs = items, inputs


class GgmlGroup:
    """What `GgmlLinear.group` prepares."""

    def __init__(
        self, matrices: tuple[QuantMatrix, ...], default: _Variant, exact: _Variant
    ) -> None:
        self.matrices = matrices
        self.types = tuple(matrix.type_id for matrix in matrices)
        self.columns = matrices[0].columns
        self.weights = self.columns * sum(matrix.rows for matrix in matrices)
        self.default = default
        self.exact = exact


class GgmlLinear:
    def __init__(
        self,
        library: GgmlLibrary,
        activations: Activations,
        matmul: Matmul,
        tiled: TiledMatmul,
        scratch: Scratch,
        bounds: KernelBounds,
    ) -> None:
        self._library = library
        self._activations = activations
        self._matmul = matmul
        self._tiled = tiled
        self._bounds = bounds
        self._every_row = scratch.reserve(4 * bounds.tokens)
        rows = (ctypes.c_int32 * bounds.tokens).from_address(self._every_row)
        rows[:] = range(bounds.tokens)

    def group(self, matrices: Sequence[QuantMatrix]) -> GgmlGroup:
        assert 1 <= len(matrices) <= MAX_GROUP_MATRICES
        assert len({matrix.columns for matrix in matrices}) == 1
        assert matrices[0].columns <= self._bounds.columns
        kept = tuple(matrices)
        return GgmlGroup(kept, self._variant(kept, False), self._variant(kept, True))

    def _variant(self, matrices: tuple[QuantMatrix, ...], exact: bool) -> _Variant:
        kinds = [activation_type(self._library, m.type_id, exact) for m in matrices]
        return _Variant([self._task(m, exact) for m in matrices], kinds)

    def _task(self, matrix: QuantMatrix, exact: bool) -> Task:
        task = task_template(
            self._library, self._activations, matrix.type_id, matrix.rows, matrix.columns, exact
        )
        task.weights = matrix.address
        task.input_rows = task.output_rows = self._every_row
        return task

    def __call__(
        self, x: Tensor, group: GgmlGroup, exact: bool, out: Sequence[Tensor] | None
    ) -> Sequence[Tensor]:
        inputs, columns = x.shape
        assert columns == group.columns
        assert inputs <= self._bounds.tokens
        if out is None:
            out = [torch.empty((inputs, matrix.rows)) for matrix in group.matrices]
        if not exact and self._tiled.pays(group.types, inputs):
            self._tiled.linear(x, group.matrices, out)
            return out
        variant = group.exact if exact else group.default
        rows = piece_rows(group.weights, columns, self._activations.values)
        source, targets = address_of(x), [address_of(target) for target in out]
        for first in range(0, inputs, rows):
            count = min(rows, inputs - first)
            self._prepare(variant, source + first * columns * 4, count, columns)
            for task, target in zip(variant.tasks, targets, strict=True):
                task.outputs = target + first * task.output_stride
            self._matmul(variant.at, len(variant.tasks), variant.items)
        return out

    def _prepare(self, variant: _Variant, source: int, inputs: int, columns: int) -> None:
        variant.plan(inputs, self._matmul.threads)
        for task in variant.on_floats:
            task.inputs = source
        for kind in variant.conversions:
            self._activations.convert(kind, source, inputs, columns)
