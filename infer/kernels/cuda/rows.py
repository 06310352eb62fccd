"""Norms, rotation, the router's choice and the weighted sum."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from infer.kernels.cuda.device import Device, at
from infer.kernels.cuda.inputs import QuantisedRows

MOST_EXPERTS = 1024
MOST_VALUES = 16  # that a thread of add_norm keeps in registers
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class Sum(NamedTuple):
    """What is added to x [n, columns]: rows [n, k, columns] weighted by [n, k], then `plain`."""

    rows: Tensor | None = None
    weights: Tensor | None = None
    plain: Tensor | None = None


class Mailbox(NamedTuple):
    """numbers int64 in pinned memory: the step, written last, and then the ids, int32 [top_k].

    step int64 [1] on the device: what is written there.
    """

    numbers: Tensor
    step: Tensor


class _Added(ctypes.Structure):
    """`Added` of add_norm.cu."""

    _fields_ = (("rows", _POINTER), ("weights", _POINTER), ("plain", _POINTER))


_ROUTE_TYPES = (
    *(_POINTER, _POINTER, _INT, _INT, _FLOAT, _POINTER, _POINTER),
    *(_POINTER, _POINTER),
)
_ADD_NORM_TYPES = (_POINTER, _Added, _POINTER, _FLOAT, _INT, _POINTER, QuantisedRows)


class Rows:
    def __init__(self, device: Device) -> None:
        function = device.function
        self._rms_norm = function(
            "rows.cu", "rms_norm", (_POINTER, _POINTER, _POINTER, _INT, _FLOAT)
        )
        self._rope = function(
            "rows.cu", "rope", (_POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT)
        )
        self._weighted_sum = function(
            "rows.cu", "weighted_sum", (_POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT)
        )
        self._device = device
        self._take = function("step.cu", "take", (_POINTER, _POINTER, _INT))
        self._give = function("step.cu", "give", (_POINTER, _POINTER, _INT))
        self._take_rows = function("step.cu", "take_rows", (_POINTER, _POINTER, _INT))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
        if out is None:
            out = torch.empty_like(x)
        columns = x.shape[-1]
        self._rms_norm(
            (x.numel() // columns, 1, 1),
            _norm_threads(columns),
            at(x),
            at(weight),
            at(out),
            columns,
            eps,
        )
        return out

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, start: int | Tensor) -> None:
        n, heads, head_dim = x.shape
        half = cos.shape[1]
        threads = min(256, -(-half // 32) * 32)
        position, offset = position_arguments(start)
        self._rope(
            (n, heads, 1), threads, at(x), at(cos), at(sin), position, offset, half, head_dim
        )

    def route_sigmoid(
        self,
        logits: Tensor,
        bias: Tensor | None,
        top_k: int,
        scale: float,
        out: tuple[Tensor, Tensor] | None,
        mailbox: Mailbox | None,
    ) -> tuple[Tensor, Tensor]:
        n, experts = logits.shape
        assert top_k <= experts <= MOST_EXPERTS
        assert mailbox is None or n == 1
        if out is None:
            ids = torch.empty((n, top_k), dtype=torch.int32, device=logits.device)
            weights = torch.empty((n, top_k), device=logits.device)
        else:
            ids, weights = out
        bias_at = None if bias is None else at(bias)
        route = self._device.function(
            "route.cu", "route_sigmoid", _ROUTE_TYPES, PER_LANE=-(-experts // 32)
        )
        route(
            (n, 1, 1),
            32,
            at(logits),
            bias_at,
            experts,
            top_k,
            scale,
            ids.data_ptr(),
            weights.data_ptr(),
            *(None, None) if mailbox is None else (x.data_ptr() for x in mailbox),
        )
        return ids, weights

    def add_norm(
        self,
        x: Tensor,
        added: Sum,
        weight: Tensor,
        eps: float,
        normed: Tensor,
        codes: QuantisedRows,
    ) -> None:
        n, columns = x.shape
        rows, weights, plain = (None if part is None else at(part) for part in added)
        ranks = 0 if added.weights is None else added.weights.shape[-1]
        threads = _norm_threads(columns)
        values = -(-columns // threads)
        assert values <= MOST_VALUES
        add_norm = self._device.function(
            "add_norm.cu", "add_norm", _ADD_NORM_TYPES, VALUES=values, RANKS=ranks
        )
        add_norm(
            (n, 1, 1),
            threads,
            at(x),
            _Added(rows, weights, plain),
            at(weight),
            eps,
            columns,
            at(normed),
            codes,
        )

    def take(self, pinned: Tensor, out: Tensor) -> None:
        assert pinned.dtype is out.dtype is torch.int64
        assert pinned.numel() == out.numel()
        self._take((1, 1, 1), 32, pinned.data_ptr(), out.data_ptr(), out.numel())

    def give(self, x: Tensor, pinned: Tensor) -> None:
        assert x.dtype is pinned.dtype is torch.float32
        assert x.numel() == pinned.numel()
        pairs, rest = divmod(x.numel(), 2)
        assert rest == 0
        self._give((-(-pairs // 256), 1, 1), 256, at(x), pinned.data_ptr(), pairs)

    def take_rows(self, sources: Tensor, out: Tensor) -> None:
        rows, columns = sources.numel(), out.shape[-1]
        assert sources.dtype is torch.int64
        assert rows * columns == out.numel()
        grid = (-(-columns // 256), rows, 1)
        self._take_rows(grid, 256, sources.data_ptr(), at(out), columns)

    def weighted_sum(self, rows: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        n, top_k, columns = rows.shape
        out = torch.empty((n, columns), device=rows.device)
        shared_at = None if shared is None else at(shared)
        self._weighted_sum(
            (-(-columns // 128), n, 1),
            128,
            at(rows),
            at(weights),
            shared_at,
            at(out),
            top_k,
            columns,
        )
        return out


def _norm_threads(columns: int) -> int:
    """Which sums a norm is made of depends on it, so it is the same in all norms."""
    return min(1024, -(-columns // 128) * 32)


def position_arguments(start: int | Tensor) -> tuple[int | None, int]:
    """(pointer, value) for a position that is known now, or by a device int32 tensor [1]."""
    if isinstance(start, Tensor):
        assert start.dtype is torch.int32
        return start.data_ptr(), 0
    return None, start
