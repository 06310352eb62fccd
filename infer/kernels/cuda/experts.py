"""The experts' gated blocks: gate and up with the activation in one launch, down in another."""

import ctypes

import numpy as np
import torch
from torch import Tensor

from infer.kernels.cuda.dense import Dense
from infer.kernels.cuda.device import Device, at
from infer.kernels.cuda.experts_grouped import GROUPED_TOKENS, GroupedExperts, can_group
from infer.kernels.cuda.formats import format_name, is_float
from infer.kernels.cuda.inputs import InputRows, Inputs, QuantisedRows
from infer.kernels.cuda.linear import DENSE_TOKENS, TILE_TOKENS, Linear, instance_tokens
from infer.kernels.cuda.resident import Resident
from infer.kernels.cuda.tiles import Plan, TileLists, Tiles
from infer.kernels.interface import ExpertBatch, ExpertFormat
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.scratch import KernelBounds

# With so many pairs an expert, on average over all experts whatever a batch holds of them, decoding
# it once for a tile of 32 is cheaper than for every 8; and dequantising it once, than for every 32.
GROUPED_PAIRS, DENSE_PAIRS = 4, 256
OUTPUT_ROWS = 32  # of a block
GATE_UP_WARPS, DOWN_WARPS = 8, 4  # in a block

_POINTER = ctypes.c_void_p
_GATE_UP_TYPES = (
    *(_POINTER, _POINTER, Tiles, Inputs, ctypes.c_int),
    *(_POINTER, QuantisedRows, _POINTER, _POINTER),
)
DOWN_TYPES = (_POINTER, Tiles, Inputs, ctypes.c_int, _POINTER, _POINTER)


class Experts:
    def __init__(
        self,
        device: Device,
        inputs: InputRows,
        linear: Linear,
        dense: Dense,
        bounds: KernelBounds,
    ) -> None:
        self._device = device
        self._inputs = inputs
        self._dense = dense
        self._bounds = bounds
        self._resident = Resident(device, inputs, linear, dense, bounds)
        self._hidden = InputRows(device, [(bounds.pairs, bounds.expert_columns)], values=True)
        self._grouped = GroupedExperts(device, self._hidden)
        self._lists = TileLists(device.device, bounds.experts, bounds.pairs)
        self._silu_product = device.function(
            "rows.cu", "silu_product", (_POINTER, _POINTER, _POINTER, ctypes.c_longlong)
        )

    def __call__(self, x: Tensor, batch: ExpertBatch, out: Tensor, exact: bool) -> None:
        shape, count, groups = batch.format, len(batch.pairs), len(batch.gate)
        self._check(x, shape, out)
        assert groups == len(batch.up) == len(batch.down) == len(batch.group_start) - 1
        if count == 0:
            return
        mean_pairs = 0 if exact else len(x) * out.shape[1] / self._bounds.experts
        if mean_pairs >= DENSE_PAIRS:
            self._run_dense(x, batch, out)
        elif mean_pairs >= GROUPED_PAIRS and can_group(shape):
            plan = self._lists.send(batch, out.shape[1], GROUPED_TOKENS)
            self._inputs.quantize(x)
            inputs = self._inputs.describe(shape.d_model, at(x), rows=len(x))
            self._grouped(inputs, shape, plan, count, at(out))
        else:
            plan = self._lists.send(batch, out.shape[1], TILE_TOKENS)
            self._run(x, shape, plan, count, out, exact, False)

    def at_addresses(
        self,
        x: Tensor,
        shape: ExpertFormat,
        addresses: Tensor,
        out: Tensor,
        exact: bool,
        quantised: bool,
    ) -> None:
        self._check(x, shape, out)
        count = out.shape[0] * out.shape[1]
        assert addresses.dtype is torch.int64
        assert addresses.shape == (3, count)
        assert addresses.is_contiguous()
        gate = addresses.data_ptr()
        tiles = Tiles(None, None, None, None, out.shape[1])
        plan = Plan(gate, gate + 8 * count, gate + 16 * count, tiles, count, 1)
        self._run(x, shape, plan, count, out, exact, quantised)

    def resident(
        self,
        x: Tensor,
        matrices: tuple[QuantMatrix, QuantMatrix, QuantMatrix],
        exact: bool,
        quantised: bool,
        out: Tensor | None,
    ) -> Tensor:
        """One gated block for all rows of x."""
        gate, up, down = matrices
        count = len(x)
        assert count <= self._bounds.tokens
        assert x.shape[1] == gate.columns
        if out is None:
            out = torch.empty((count, down.rows), device=x.device)
        if count >= DENSE_TOKENS and not exact:
            shape = ExpertFormat(gate.type_id, up.type_id, down.type_id, gate.columns, gate.rows)
            addresses = (gate.address, up.address, down.address)
            self._dense_block(x.to(torch.bfloat16), shape, addresses, out)
        else:
            self._resident(x, matrices, exact, quantised, out)
        return out

    def _check(self, x: Tensor, shape: ExpertFormat, out: Tensor) -> None:
        assert x.shape[1] == shape.d_model == out.shape[2]
        assert len(x) == len(out) <= self._bounds.tokens

    def _quantize(self, x: Tensor, shape: ExpertFormat, exact: bool) -> None:
        if not exact and not (is_float(shape.gate_type) and is_float(shape.up_type)):
            self._inputs.quantize(x)

    def _run(
        self,
        x: Tensor,
        shape: ExpertFormat,
        plan: Plan,
        count: int,
        out: Tensor,
        exact: bool,
        quantised: bool,
    ) -> None:
        if not quantised:
            self._quantize(x, shape, exact)
        inputs = self._inputs.describe(shape.d_model, at(x), rows=len(x))
        self._launch(inputs, shape, plan, count, at(out), exact)

    def _launch(
        self,
        inputs: Inputs,
        shape: ExpertFormat,
        plan: Plan,
        count: int,
        out_at: int,
        exact: bool,
    ) -> None:
        device = self._device
        gate, up, down = map(format_name, shape[:3])
        tokens = instance_tokens(plan.most_pairs)
        exactly = {"EXACT": 1} if exact else {}
        floats = {"HIDDEN_FLOAT": 1} if exact or is_float(shape.down_type) else {}
        gate_up = device.function(
            "experts.cu",
            "gate_up",
            _GATE_UP_TYPES,
            GATE=gate,
            UP=up,
            TOKENS=tokens,
            WARPS=GATE_UP_WARPS,
            **exactly,
            **floats,
        )
        gate_up(
            (-(-shape.d_ff // OUTPUT_ROWS), plan.tile_count, 1),
            32 * GATE_UP_WARPS,
            plan.gate,
            plan.up,
            plan.tiles,
            inputs,
            shape.d_ff,
            self._hidden.values.data_ptr(),
            self._hidden.target(count, shape.d_ff),
            device.grid(gate),
            device.grid(up),
        )
        self._down(shape, plan, count, out_at, down, {"TOKENS": tokens, **exactly})

    def _down(
        self,
        shape: ExpertFormat,
        plan: Plan,
        count: int,
        out_at: int,
        name: str,
        defines: dict[str, int],
    ) -> None:
        function = self._device.function(
            "experts.cu", "down", DOWN_TYPES, FORMAT=name, WARPS=DOWN_WARPS, **defines
        )
        function(
            (-(-shape.d_model // OUTPUT_ROWS), plan.tile_count, 1),
            32 * DOWN_WARPS,
            plan.down,
            plan.tiles,
            self._hidden.describe(shape.d_ff, rows=count),
            shape.d_model,
            out_at,
            self._device.grid(name),
        )

    def _run_dense(self, x: Tensor, batch: ExpertBatch, out: Tensor) -> None:
        rows = out.view(-1, out.shape[2])
        halved = x.to(torch.bfloat16)
        pairs = torch.from_numpy(batch.pairs.astype(np.int64)).to(x.device)
        parts = (batch.gate.tolist(), batch.up.tolist(), batch.down.tolist())
        for index, addresses in enumerate(zip(*parts, strict=True)):
            mine = pairs[batch.group_start[index] : batch.group_start[index + 1]]
            if len(mine) == 0:
                continue
            result = torch.empty((len(mine), out.shape[2]), device=x.device)
            self._dense_block(halved[mine // out.shape[1]], batch.format, addresses, result)
            rows[mine] = result

    def _dense_block(
        self, x: Tensor, shape: ExpertFormat, addresses: tuple[int, ...], out: Tensor
    ) -> None:
        """x bfloat16 [n, d_model] -> out float32 [n, d_model]."""
        gate, up, down = addresses
        products = torch.empty((2, len(x), shape.d_ff), device=x.device)
        for part, (kind, address) in enumerate(((shape.gate_type, gate), (shape.up_type, up))):
            matrix = QuantMatrix(kind, shape.d_ff, shape.d_model, address)
            self._dense.linear(x, matrix, products[part])
        hidden, size = products[0], products[0].numel()
        self._silu_product(
            (-(-size // 256), 1, 1), 256, at(hidden), at(products[1]), at(hidden), size
        )
        matrix = QuantMatrix(shape.down_type, shape.d_model, shape.d_ff, down)
        self._dense.linear(hidden.to(torch.bfloat16), matrix, out)
