"""Norms, rotation, the router's choice and the weighted sum."""

import ctypes

import torch
from torch import Tensor

from infer.kernels.cuda.device import Device, at

MOST_EXPERTS = 1024
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


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
        self._route = function(
            "route.cu",
            "route_sigmoid",
            (_POINTER, _POINTER, _INT, _INT, _FLOAT, _POINTER, _POINTER),
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
        if out is None:
            out = torch.empty_like(x)
        columns = x.shape[-1]
        threads = min(1024, -(-columns // 128) * 32)
        self._rms_norm(
            (x.numel() // columns, 1, 1), threads, at(x), at(weight), at(out), columns, eps
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
        self, logits: Tensor, bias: Tensor | None, top_k: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        n, experts = logits.shape
        assert top_k <= experts <= MOST_EXPERTS
        ids = torch.empty((n, top_k), dtype=torch.int32, device=logits.device)
        weights = torch.empty((n, top_k), device=logits.device)
        bias_at = None if bias is None else at(bias)
        self._route(
            (n, 1, 1),
            32,
            at(logits),
            bias_at,
            experts,
            top_k,
            scale,
            ids.data_ptr(),
            weights.data_ptr(),
        )
        return ids, weights

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


def position_arguments(start: int | Tensor) -> tuple[int | None, int]:
    """(pointer, value) for a position that is known now, or by a device int32 tensor [1]."""
    if isinstance(start, Tensor):
        assert start.dtype is torch.int32
        return start.data_ptr(), 0
    return None, start
