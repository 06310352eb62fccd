"""The gated blocks of experts that many tokens chose: tiles of more pairs, on tensor cores."""

import ctypes

from infer.kernels.cuda.device import Device
from infer.kernels.cuda.formats import format_name, is_float
from infer.kernels.cuda.inputs import InputRows, Inputs, QuantisedRows
from infer.kernels.cuda.tiles import Plan, Tiles
from infer.kernels.interface import ExpertFormat

GROUPED_TOKENS = 32  # of a tile
# ROWS and WARPS of experts_grouped.cu.
_ROWS, _THREADS = 64, 256

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_GATE_UP_TYPES = (_POINTER, _POINTER, Tiles, Inputs, _INT, QuantisedRows, _POINTER)
_DOWN_TYPES = (_POINTER, Tiles, Inputs, _INT, _POINTER, _POINTER)


def can_group(shape: ExpertFormat) -> bool:
    """Of whatever files hold in practice: gate and up of one type, none of them floats."""
    return shape.gate_type == shape.up_type and not any(map(is_float, shape[:3]))


class GroupedExperts:
    """hidden: room for the quantised gated rows of all pairs."""

    def __init__(self, device: Device, hidden: InputRows) -> None:
        self._device = device
        self._hidden = hidden

    def __call__(
        self, inputs: Inputs, shape: ExpertFormat, plan: Plan, count: int, out_at: int
    ) -> None:
        """plan: of tiles of GROUPED_TOKENS; count: pairs; rows of out by pair."""
        device, hidden = self._device, self._hidden
        gate, _, down = map(format_name, shape[:3])
        defines = {"TOKENS": GROUPED_TOKENS}
        source = "experts_grouped.cu"
        gate_up = device.function(
            source, "gate_up", _GATE_UP_TYPES, FORMAT=gate, GATED=1, **defines
        )
        gate_up(
            (-(-shape.d_ff // (_ROWS // 2)), plan.tile_count, 1),
            _THREADS,
            plan.gate,
            plan.up,
            plan.tiles,
            inputs,
            shape.d_ff,
            hidden.target(count, shape.d_ff),
            device.grid(gate),
        )
        function = device.function(source, "down", _DOWN_TYPES, FORMAT=down, **defines)
        function(
            (-(-shape.d_model // _ROWS), plan.tile_count, 1),
            _THREADS,
            plan.down,
            plan.tiles,
            hidden.describe(shape.d_ff, rows=count),
            shape.d_model,
            out_at,
            device.grid(down),
        )
