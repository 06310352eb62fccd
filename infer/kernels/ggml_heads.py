"""Products of each head's input with a matrix of its own, in one parallel region."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from infer.kernels.compiled_matmul import Task
from infer.kernels.ggml_activations import Activations
from infer.kernels.ggml_library import GgmlLibrary
from infer.kernels.matmul_tasks import Matmul, activation_type, item_rows, task_template
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.scratch import LatentBounds, Scratch, address_of
from infer.kernels.thread_team import ThreadTeam
from shared.quants import TensorType

_TASK = np.dtype(Task)


class _Variant:
    """One task a head, in one arithmetic; `kind` is the format of the inputs."""

    def __init__(self, template: Task, matrices: Sequence[QuantMatrix], kind: int) -> None:
        self._array = (Task * len(matrices))(*[template] * len(matrices))
        self.at = ctypes.addressof(self._array)
        self.tasks = np.frombuffer(self._array, _TASK)
        self.tasks["weights"] = [matrix.address for matrix in matrices]
        # The same head's rows of two tokens have those of the other heads in between.
        self.tasks["input_stride"] *= len(matrices)
        self.tasks["output_stride"] *= len(matrices)
        self.input_bytes = template.input_stride
        self.kind = kind
        self.items = 0
        self._inputs = 0

    def plan(self, inputs: int, threads: int) -> None:
        """Number the items for this many inputs a head."""
        if inputs == self._inputs:
            return
        tasks, heads = self.tasks, len(self.tasks)
        columns, all_rows = int(tasks["columns"][0]), int(tasks["rows"][0])
        rows = item_rows(columns, inputs, heads * all_rows * columns, threads)
        items = -(-all_rows // rows)
        tasks["count"], tasks["item_rows"] = inputs, rows
        tasks["first_item"] = np.arange(heads) * items
        tasks["end_item"] = np.arange(1, heads + 1) * items
        # Last, so that a plan cut short by Ctrl-C is made again.
        self.items, self._inputs = heads * items, inputs


class GgmlHeadMatrices:
    """What `GgmlHeads.group` prepares."""

    def __init__(
        self, matrices: tuple[QuantMatrix, ...], default: _Variant, exact: _Variant
    ) -> None:
        self.matrices = matrices
        self.rows, self.columns = matrices[0].rows, matrices[0].columns
        self.default = default
        self.exact = exact


class GgmlHeads:
    def __init__(
        self,
        library: GgmlLibrary,
        team: ThreadTeam,
        matmul: Matmul,
        scratch: Scratch,
        tokens: int,
        bounds: LatentBounds,
    ) -> None:
        self._library = library
        self._matmul = matmul
        self._bounds = bounds
        self._tokens = tokens
        self._activations = Activations(
            library, team, scratch, tokens * bounds.heads * bounds.head_columns
        )
        self._every_row = scratch.reserve(4 * tokens)
        rows = (ctypes.c_int32 * tokens).from_address(self._every_row)
        rows[:] = range(tokens)

    def group(self, matrices: Sequence[QuantMatrix]) -> GgmlHeadMatrices:
        first = matrices[0]
        assert len({(m.type_id, m.rows, m.columns) for m in matrices}) == 1
        assert len(matrices) <= self._bounds.heads
        assert first.columns <= self._bounds.head_columns
        kept = tuple(matrices)
        return GgmlHeadMatrices(kept, self._variant(kept, False), self._variant(kept, True))

    def _variant(self, matrices: tuple[QuantMatrix, ...], exact: bool) -> _Variant:
        first = matrices[0]
        template = task_template(
            self._library, self._activations, first.type_id, first.rows, first.columns, exact
        )
        template.input_rows = template.output_rows = self._every_row
        kind = activation_type(self._library, first.type_id, exact)
        return _Variant(template, matrices, kind)

    def __call__(self, x: Tensor, group: GgmlHeadMatrices, exact: bool) -> Tensor:
        inputs, heads, columns = x.shape
        assert heads == len(group.matrices)
        assert columns == group.columns
        assert inputs <= self._tokens
        out = torch.empty((inputs, heads, group.rows))
        variant = group.exact if exact else group.default
        variant.plan(inputs, self._matmul.threads)
        source = address_of(x)
        if variant.kind != TensorType.F32:
            self._activations.convert(variant.kind, source, inputs * heads, columns)
            source = self._activations.address(variant.kind)
        every_head = np.arange(heads)
        variant.tasks["inputs"] = source + every_head * variant.input_bytes
        variant.tasks["outputs"] = out.data_ptr() + every_head * group.rows * 4
        self._matmul(variant.at, heads, variant.items)
        return out
