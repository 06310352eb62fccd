"""The experts' gated blocks: gate and up in one parallel region, then the activation, then down."""

import ctypes

import numpy as np
import torch
from torch import Tensor

from infer.kernels.compiled_matmul import HiddenJob, Task, hidden, plan_tasks
from infer.kernels.ggml_activations import Activations
from infer.kernels.ggml_library import GgmlLibrary
from infer.kernels.interface import ExpertBatch, ExpertFormat
from infer.kernels.jobs import prepared_job
from infer.kernels.matmul_tasks import Matmul, activation_type, item_rows, task_template
from infer.kernels.pieces import part_by_count, piece_rows, piece_values, split_batch
from infer.kernels.scratch import KernelBounds, Scratch, address_of
from infer.kernels.thread_team import ThreadTeam
from infer.kernels.tiled_matmul import TiledMatmul, least_tokens
from shared.quants import TensorType

_TASK_BYTES = ctypes.sizeof(Task)


class _Prepared:
    """One format in one arithmetic: the tasks without what differs between experts and calls."""

    def __init__(self, gate: Task, up: Task, down: Task, kinds: list[int]) -> None:
        self.gate, self.up, self.down = gate, up, down
        self.on_floats = [task for task in (gate, up) if task.inputs == 0]
        self.conversions = sorted({*kinds[:2]} - {int(TensorType.F32)})
        self.down_kind = kinds[2]


class GgmlExperts:
    def __init__(
        self,
        library: GgmlLibrary,
        team: ThreadTeam,
        activations: Activations,
        matmul: Matmul,
        tiled: TiledMatmul,
        scratch: Scratch,
        bounds: KernelBounds,
    ) -> None:
        self._library = library
        self._team = team
        self._activations = activations
        self._matmul = matmul
        self._tiled = tiled
        self._bounds = bounds
        # A dense block has one pair a token, and may be wider than an expert.
        self._hidden_values = max(
            piece_values(bounds.expert_columns, bounds.pairs),
            piece_values(bounds.columns, bounds.tokens),
        )
        self._hidden = Activations(library, team, scratch, self._hidden_values)
        self._gate_rows = scratch.reserve(4 * self._hidden_values)
        self._up_rows = scratch.reserve(4 * self._hidden_values)
        self._first_tasks = scratch.reserve(2 * bounds.experts * _TASK_BYTES)
        self._down_tasks = scratch.reserve(bounds.experts * _TASK_BYTES)
        self._activate = prepared_job(HiddenJob, team.at)
        self._activate.gate, self._activate.up = self._gate_rows, self._up_rows
        most_pairs = max(bounds.pairs, bounds.tokens)
        self.every_pair = np.arange(most_pairs, dtype=np.int32)
        self._token_of = np.empty(most_pairs, np.int32)
        self._prepared: dict[tuple[ExpertFormat, bool], _Prepared] = {}

    def __call__(self, x: Tensor, batch: ExpertBatch, out: Tensor, exact: bool) -> None:
        shape, count, groups = batch.format, len(batch.pairs), len(batch.gate)
        assert x.shape[1] == shape.d_model == out.shape[2]
        assert len(x) == len(out) <= self._bounds.tokens
        assert groups == len(batch.up) == len(batch.down) == len(batch.group_start) - 1
        assert groups <= self._bounds.experts
        if not exact and self._tiled.pays(shape[:3], count):
            many, batch = part_by_count(batch, least_tokens(shape[:3]))
            self._tiled.experts(x, many, out)
        if len(batch.pairs) == 0:
            return
        prepared = self._prepared.get((shape, exact)) or self._prepare(shape, exact)
        most = min(
            piece_rows(3 * shape.d_model * shape.d_ff, shape.d_ff, self._hidden_values),
            max(1, self._activations.values // shape.d_model),
        )
        for piece in split_batch(batch, most):
            self._multiply(x, piece, prepared, out)

    def _multiply(self, x: Tensor, batch: ExpertBatch, prepared: _Prepared, out: Tensor) -> None:
        shape, count, groups = batch.format, len(batch.pairs), len(batch.gate)
        pairs_each = count // groups
        self._gate_and_up(x, batch, prepared, out.shape[1], pairs_each)
        self._activate_hidden(prepared, count, shape.d_ff)
        down = prepared.down
        down.outputs = address_of(out)
        weights, threads = groups * shape.d_model * shape.d_ff, self._matmul.threads
        down.item_rows = item_rows(shape.d_ff, pairs_each, weights, threads)
        items = plan_tasks(
            self._down_tasks,
            ctypes.addressof(down),
            0,
            batch.down,
            batch.group_start,
            self.every_pair,
            batch.pairs,
        )
        self._matmul(self._down_tasks, groups, items)

    def _gate_and_up(
        self, x: Tensor, batch: ExpertBatch, prepared: _Prepared, top_k: int, pairs_each: int
    ) -> None:
        token_of = self._token_of[: len(batch.pairs)]
        np.floor_divide(batch.pairs, top_k, out=token_of)
        if len(token_of) < len(x):
            # Of a long prompt only the tokens that these experts work on
            x = x.index_select(0, torch.from_numpy(token_of))
            token_of = self.every_pair
        source, width = address_of(x), x.shape[1]
        for kind in prepared.conversions:
            self._activations.convert(kind, source, len(x), width)
        for task in prepared.on_floats:
            task.inputs = source
        groups, items, place = len(batch.gate), 0, self._first_tasks
        for task, weights in ((prepared.gate, batch.gate), (prepared.up, batch.up)):
            both = 2 * groups * width * batch.format.d_ff
            task.item_rows = item_rows(width, pairs_each, both, self._matmul.threads)
            items = plan_tasks(
                place,
                ctypes.addressof(task),
                items,
                weights,
                batch.group_start,
                token_of,
                self.every_pair,
            )
            place += groups * _TASK_BYTES
        self._matmul(self._first_tasks, 2 * groups, items)

    def _activate_hidden(self, prepared: _Prepared, count: int, d_ff: int) -> None:
        job, kind = self._activate, prepared.down_kind
        job.items, job.width = count, d_ff
        job.from_float = self._hidden.from_float(kind)
        job.destination, job.destination_stride = prepared.down.inputs, prepared.down.input_stride
        self._team.run(job, hidden)

    def _prepare(self, shape: ExpertFormat, exact: bool) -> _Prepared:
        """UnsupportedModel where a type cannot be multiplied."""
        assert shape.d_model <= self._bounds.columns

        def task(activations: Activations, type_id: int, rows: int, columns: int) -> Task:
            return task_template(self._library, activations, type_id, rows, columns, exact)

        gate = task(self._activations, shape.gate_type, shape.d_ff, shape.d_model)
        up = task(self._activations, shape.up_type, shape.d_ff, shape.d_model)
        down = task(self._hidden, shape.down_type, shape.d_model, shape.d_ff)
        gate.outputs, up.outputs = self._gate_rows, self._up_rows
        down.inputs = down.inputs or self._gate_rows
        kinds = [activation_type(self._library, type_id, exact) for type_id in shape[:3]]
        self._prepared[shape, exact] = prepared = _Prepared(gate, up, down, kinds)
        return prepared
