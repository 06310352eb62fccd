"""Quantise and dequantise rows with ggml's own functions, on several threads.

size_t ggml_quantize_chunk(type, const float *src, void *dst, int64_t start, int64_t rows,
                           int64_t columns, const float *importance)
"""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
from numpy.typing import NDArray

from infer.kernels import ggml_library
from shared.errors import MalformedModel, UnsupportedModel
from shared.quants import GEOMETRY, TensorType, row_bytes

_WHOLE_NUMBERS = (TensorType.I8, TensorType.I16, TensorType.I32, TensorType.I64, TensorType.F64)
# What a dot product makes of its activations; no file has weights of these.
_INTERNAL = (TensorType.Q8_1, TensorType.Q8_K)


def writable_types() -> dict[str, int]:
    """Name -> id of the types that `quantize` can make."""
    left_out = (*_WHOLE_NUMBERS, *_INTERNAL)
    return {kind.name: int(kind) for kind in TensorType if kind not in left_out}


def needs_importance(type_id: int) -> bool:
    """Whether ggml makes this type with an importance matrix only."""
    return bool(_base().ggml_quantize_requires_imatrix(type_id))


def quantize(
    weights: NDArray[np.float32], type_id: int, importance: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """float32 [rows, columns] -> uint8 [rows, row bytes].

    `importance` float32 [columns] weighs each column's error: the mean square of what it is
    multiplied with. MalformedModel for weights that are not finite.
    """
    rows, columns = weights.shape
    assert importance is not None or not needs_importance(type_id)
    assert importance is None or importance.shape == (columns,)
    if not np.isfinite(weights).all():
        raise MalformedModel("a weight is not a finite number", "download the model again")
    if type_id == TensorType.F32:
        return np.ascontiguousarray(weights).view(np.uint8)
    weights = np.ascontiguousarray(weights, np.float32)
    if importance is not None:
        importance = np.ascontiguousarray(importance, np.float32)
    out = np.empty((rows, row_bytes(type_id, columns)), np.uint8)
    base, address = _base(), None if importance is None else importance.ctypes.data

    def part(first: int, last: int) -> None:
        base.ggml_quantize_chunk(
            type_id,
            weights.ctypes.data,
            out.ctypes.data,
            first * columns,
            last - first,
            columns,
            address,
        )

    base.ggml_quantize_init(type_id)  # fills tables; the threads then only read them
    _in_parts(part, rows)
    return out


def dequantize(data: NDArray[np.uint8], type_id: int, columns: int) -> NDArray[np.float32]:
    """uint8 [rows, row bytes] -> float32 [rows, columns]; UnsupportedModel where ggml cannot."""
    data = np.ascontiguousarray(data)
    rows = len(data)
    if type_id == TensorType.F32:
        return data.view(np.float32)
    address = ggml_library.load().functions(type_id).to_float
    to_float = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(address)
    out = np.empty((rows, columns), np.float32)

    def part(first: int, last: int) -> None:
        to_float(data[first:].ctypes.data, out[first:].ctypes.data, (last - first) * columns)

    _in_parts(part, rows)
    return out


def type_of(name: str) -> int:
    """The id of a type's name, in any case; UnsupportedModel where there is none we can make."""
    found = writable_types().get(name.upper())
    if found is None:
        raise UnsupportedModel(
            f"{name} is not a tensor type that can be made",
            f"there are {', '.join(sorted(writable_types()))}",
        )
    return found


def type_name(type_id: int) -> str:
    return GEOMETRY[type_id].name


def _in_parts(action, rows: int) -> None:
    """action(first, last) over all rows; ggml's functions run without the interpreter's lock."""
    bounds = np.linspace(0, rows, min(rows, 4 * _thread_count()) + 1).astype(int).tolist()
    list(_pool().map(action, bounds[:-1], bounds[1:]))


def _thread_count() -> int:
    return len(os.sched_getaffinity(0))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_thread_count(), thread_name_prefix="quantise")


@cache
def _base() -> ctypes.CDLL:
    base = ggml_library.load().base
    whole, pointer = ctypes.c_int64, ctypes.c_void_p
    base.ggml_quantize_chunk.argtypes = (
        ctypes.c_int,
        pointer,
        pointer,
        whole,
        whole,
        whole,
        pointer,
    )
    base.ggml_quantize_chunk.restype = ctypes.c_size_t
    base.ggml_quantize_requires_imatrix.argtypes = (ctypes.c_int,)
    base.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    base.ggml_quantize_init.argtypes = (ctypes.c_int,)
    base.ggml_quantize_init.restype = None
    return base
