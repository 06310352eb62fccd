"""What stands in front of a GGUF file's tensors, and where these lie.

    magic "GGUF" | version u32 | tensor count u64 | key count u64
    key count x { key: string | value type u32 | value }
    tensor count x { name: string | dimension count u32 | dimensions u64 each | type u32 | offset }
    padding | each tensor at a multiple of the alignment

Offsets count from behind that padding.
"""

import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shared.quants import row_bytes

VERSION = 3
ALIGNMENT = 32

_U8, _I8, _U16, _I16, _U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64, _I64, _F64 = range(13)
_ARRAY_TYPES = {
    np.dtype(code): value_type
    for code, value_type in {
        "u1": _U8,
        "i1": _I8,
        "u2": _U16,
        "i2": _I16,
        "u4": _U32,
        "i4": _I32,
        "f4": _F32,
        "?": _BOOL,
        "u8": _U64,
        "i8": _I64,
        "f8": _F64,
    }.items()
}


class RawValue(bytes):
    """A value as it stands in another file: its type u32 and its bytes."""


class TensorPlan(NamedTuple):
    """One tensor to be written; `shape` in ggml's order, columns first."""

    name: str
    shape: tuple[int, ...]
    type_id: int

    @property
    def byte_count(self) -> int:
        return row_bytes(self.type_id, self.shape[0]) * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Layout:
    """`header` with its padding; `offsets` of the tensors from the file's start."""

    header: bytes
    offsets: tuple[int, ...]
    total_bytes: int


def layout(metadata: Mapping[str, Any], tensors: Sequence[TensorPlan]) -> Layout:
    """Values: bool, int, float (as F32), str, numpy arrays, lists of one of these, RawValue."""
    head = bytearray(struct.pack("<4sIQQ", b"GGUF", VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        head += _string(key) + encode_value(value)
    relative = 0
    offsets = []
    for tensor in tensors:
        head += _string(tensor.name) + struct.pack("<I", len(tensor.shape))
        head += struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape, tensor.type_id, relative)
        offsets.append(relative)
        relative += _padded(tensor.byte_count)
    head += bytes(_padded(len(head)) - len(head))
    start = len(head)
    return Layout(bytes(head), tuple(start + offset for offset in offsets), start + relative)


def encode_value(value: Any) -> bytes:
    """A metadata value with its type in front."""
    match value:
        case RawValue():
            return value
        case bool():
            return struct.pack("<I?", _BOOL, value)
        case int():
            kind, code = (
                (_I64, "q") if value < 0 else (_U32, "I") if value < 1 << 32 else (_U64, "Q")
            )
            return struct.pack(f"<I{code}", kind, value)
        case float():
            return struct.pack("<If", _F32, value)
        case str():
            return struct.pack("<I", _STRING) + _string(value)
        case _:
            return _encode_array(value)


def _encode_array(value: Any) -> bytes:
    if isinstance(value, list) and value and isinstance(value[0], str):
        body = b"".join(_string(text) for text in value)
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + body
    array = np.asarray(value)
    if array.dtype == np.int64 and not isinstance(value, np.ndarray):
        array = array.astype(np.int32)
    return struct.pack("<IIQ", _ARRAY, _ARRAY_TYPES[array.dtype], array.size) + array.tobytes()


def write_header_only(
    path: Path, metadata: Mapping[str, Any], tensors: Sequence[TensorPlan]
) -> int:
    """A file of the header alone, put in place at once; the bytes it would have in full."""
    plan = layout(metadata, tensors)
    part = Path(f"{path}.part")
    part.write_bytes(plan.header)
    os.replace(part, path)
    return plan.total_bytes


def _string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _padded(byte_count: int) -> int:
    return -(-byte_count // ALIGNMENT) * ALIGNMENT
