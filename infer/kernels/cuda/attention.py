"""Attention over a cache: our own kernel for a few tokens, torch's for many."""

import ctypes

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from infer.kernels.cuda.device import Device, at
from infer.kernels.cuda.inputs import NO_CODES, InputRows, QuantisedRows
from infer.kernels.cuda.rows import position_arguments
from infer.kernels.scratch import KernelBounds
from shared.errors import UnsupportedModel

# From so many tokens on, torch's kernels are used: they share the keys between the tokens.
FLASH_TOKENS = 9
_MOST_SECTIONS, _LEAST_SECTION, _WARPS, _SLICES = 96, 64, 4, 4  # as in attention.cuh
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class _Sections(ctypes.Structure):
    """`Sections` of attention.cu."""

    _fields_ = (("mixed", ctypes.c_void_p), ("marks", ctypes.c_void_p))


_ATTEND_TYPES = (
    *(_POINTER, _POINTER, _POINTER, _POINTER, _INT, _FLOAT, _INT, _INT),
    _Sections,
)
_COMBINE_TYPES = (_Sections, _POINTER, _INT, _POINTER, QuantisedRows)


class Attention:
    def __init__(self, device: Device, inputs: InputRows, bounds: KernelBounds) -> None:
        self._device = device
        self._inputs = inputs
        self._bounds = bounds
        rows = (FLASH_TOKENS - 1) * bounds.heads
        self._mixed = torch.empty((rows, _MOST_SECTIONS, bounds.head_dim), device=device.device)
        self._marks = torch.empty((rows, _MOST_SECTIONS, 2), device=device.device)
        self._sections = _Sections(self._mixed.data_ptr(), self._marks.data_ptr())

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        start: int | Tensor,
        scale: float,
        quantise: bool,
    ) -> Tensor:
        n, heads, head_dim = q.shape
        kv_heads = keys.shape[1]
        assert heads <= self._bounds.heads
        assert heads % kv_heads == 0
        assert keys.shape == values.shape
        if isinstance(start, int):
            assert start + n <= len(keys)
            if n >= FLASH_TOKENS and keys.dtype is not torch.float32:
                return _flash(q, keys[: start + n], values[: start + n], start, scale)
        if head_dim % 32 or head_dim > self._bounds.head_dim:
            raise UnsupportedModel(
                f"attention heads of {head_dim} dimensions are not supported on a GPU",
                "use --device cpu",
            )
        out = torch.empty_like(q)
        assert not quantise or n < FLASH_TOKENS
        codes = self._inputs.target(n, heads * head_dim) if quantise else NO_CODES
        step = FLASH_TOKENS - 1
        for first in range(0, n, step):
            rows = slice(first, first + step)
            position = start + first if isinstance(start, int) else start
            assert first == 0 or isinstance(start, int)
            self._attend(q[rows], keys, values, position, scale, out[rows], codes)
        return out

    def _attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        start: int | Tensor,
        scale: float,
        out: Tensor,
        codes: QuantisedRows,
    ) -> None:
        n, heads, head_dim = q.shape
        kv_heads = keys.shape[1]
        sharing = heads // kv_heads
        source, group, defines = self._instance(sharing, head_dim, keys.dtype)
        attend = self._device.function(source, "attend", _ATTEND_TYPES, **defines)
        combine = self._device.function(source, "combine", _COMBINE_TYPES, **defines)
        position, offset = position_arguments(start)
        sections = _most_sections(start, n, len(keys))
        assert keys.is_contiguous()
        assert values.is_contiguous()
        attend(
            (sections, kv_heads * -(-sharing // group), n),
            32 * _WARPS,
            at(q),
            keys.data_ptr(),
            values.data_ptr(),
            position,
            offset,
            scale,
            heads,
            kv_heads,
            self._sections,
        )
        combine((heads, n, 1), _SLICES * head_dim, self._sections, position, offset, at(out), codes)

    def _instance(
        self, sharing: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[str, int, dict[str, int]]:
        """Source, query heads a block takes, and defines."""
        defines = {"HEAD_DIM": head_dim, "GROUP": 8}
        if dtype is torch.bfloat16:
            defines["KV_BF16"] = 1
        if dtype.itemsize == 2 and head_dim % 64 == 0 and self._device.architecture >= 80:
            return "attention_mma.cu", 8, defines
        group = min(8, 1 << (sharing - 1).bit_length())
        return "attention.cu", group, {**defines, "GROUP": group, "KV_BYTES": dtype.itemsize}


def _most_sections(start: int | Tensor, n: int, context: int) -> int:
    """Blocks enough for the longest row: of the call, or of the cache if that is unknown."""
    length = context if isinstance(start, Tensor) else start + n
    return min(_MOST_SECTIONS, -(-length // _LEAST_SECTION))


def _flash(q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    """torch's fused attention in the cache's type; its sums depend on the shapes."""
    q, keys, values = (x.transpose(0, 1)[None] for x in (q.to(keys.dtype), keys, values))
    mask = (
        {"is_causal": True}
        if start == 0
        else {"attn_mask": causal_lower_right(q.shape[2], keys.shape[2])}
    )
    mixed = scaled_dot_product_attention(q, keys, values, scale=scale, enable_gqa=True, **mask)
    return mixed[0].transpose(0, 1).to(torch.float32).contiguous()
