"""From projections to attention in one launch: norms, rotation, keys and values into the cache."""

import ctypes

import torch
from torch import Tensor

from infer.kernels.cuda.device import Device, at
from infer.kernels.cuda.rows import position_arguments

MOST_DIMS = 512
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class _Rotation(ctypes.Structure):
    """`Rotation` of heads.cu."""

    _fields_ = (("cosines", _POINTER), ("sines", _POINTER), ("half", _INT))


class _Cache(ctypes.Structure):
    """`Cache` of heads.cu."""

    _fields_ = (("keys", _POINTER), ("values", _POINTER), ("kind", _INT))


class Heads:
    def __init__(self, device: Device) -> None:
        types = (
            *(_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _FLOAT, _Rotation, _Cache),
            *(_POINTER, _INT, _INT, _INT, _INT),
        )
        self._prepare = device.function("heads.cu", "prepare_heads", types)

    def __call__(
        self,
        projections: tuple[Tensor, Tensor, Tensor],
        norms: tuple[Tensor, Tensor],
        eps: float,
        tables: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        start: int | Tensor,
    ) -> None:
        q, k, v = projections
        keys, values = cache
        n, heads, dims = q.shape
        kv_heads = k.shape[1]
        assert dims <= MOST_DIMS
        assert keys.shape == values.shape
        assert keys.shape[1:] == k.shape[1:] == v.shape[1:]
        assert keys.is_contiguous()
        assert values.is_contiguous()
        cos, sin = tables
        position, offset = position_arguments(start)
        self._prepare(
            (heads + 2 * kv_heads, n, 1),
            32,
            *(at(x) for x in (q, k, v, *norms)),
            eps,
            _Rotation(at(cos), at(sin), cos.shape[1]),
            _Cache(keys.data_ptr(), values.data_ptr(), _KINDS[keys.dtype]),
            position,
            offset,
            heads,
            kv_heads,
            dims,
        )
