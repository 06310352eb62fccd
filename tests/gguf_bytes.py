"""GGUF files that no writer makes: built byte by byte, or patched after writing."""

import struct
from pathlib import Path

import gguf

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10


def string(text: bytes | str) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def key(name: bytes | str, value_type: int, payload: bytes) -> bytes:
    return string(name) + struct.pack("<I", value_type) + payload


def array_key(name: str, element_type: int, count: int, payload: bytes) -> bytes:
    return key(name, ARRAY, struct.pack("<IQ", element_type, count) + payload)


def tensor(
    name: bytes | str, shape: tuple[int, ...] = (8,), type_id: int = 0, offset: int = 0
) -> bytes:
    """A tensor's entry; its contents go into `raw_gguf`'s `data`."""
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + axes + struct.pack("<IQ", type_id, offset)


def raw_gguf(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file with `general.architecture` = "test" as its first key; counts may lie."""
    keys = (key("general.architecture", STRING, string("test")), *keys)
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join((*keys, *tensors))
    return head + bytes(-len(head) % alignment) + data


def patch_scalar(path: Path, name: str, value: float) -> None:
    """Overwrite the number stored under the key `name`, keeping its type."""
    field = gguf.GGUFReader(path).fields[name]
    value_at = field.offset + sum(part.nbytes for part in field.parts[:-1])
    _overwrite(path, value_at, field.parts[-1].dtype.type(value).tobytes())


def patch_tensor(
    path: Path, name: str, *, type_id: int | None = None, offset: int | None = None
) -> None:
    """Overwrite the type or the (relative) offset in the entry of the tensor `name`."""
    tensors = gguf.GGUFReader(path).tensors
    field = next(tensor.field for tensor in tensors if tensor.name == name)
    type_at = field.offset + sum(part.nbytes for part in field.parts[:-2])
    if type_id is not None:
        _overwrite(path, type_at, struct.pack("<I", type_id))
    if offset is not None:
        _overwrite(path, type_at + 4, struct.pack("<Q", offset))


def _overwrite(path: Path, offset: int, patch: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(patch)
