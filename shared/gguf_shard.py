"""One GGUF file: header, metadata and where each tensor lies.

magic "GGUF" | version u32 | tensor count u64 | key count u64
metadata (see gguf_values)
tensor count x { name: string | dimension count u32 | dimensions u64 each | type u32 | offset u64 }
padding to general.alignment
data: each tensor at the data's start + its offset, a multiple of the alignment
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shared.errors import MalformedModel, ModelError, UnsupportedModel
from shared.fingerprint import Fingerprint
from shared.gguf_header import HeaderReader, open_model_file, shown
from shared.gguf_values import Metadata, read_metadata, read_name
from shared.quants import row_bytes

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_TENSORS = 1 << 17  # real ones: 2,000; with every expert a tensor of its own 60,000
MAX_DIMENSIONS = 4
MIN_TENSOR_ENTRY_BYTES = 8 + 4 + 8 + 4 + 8  # an empty name and one dimension


class TensorInfo(NamedTuple):
    """One tensor. `shape` in ggml's order: columns (in), rows (out), experts; 1 to 4 of them.

    `offset` counts from the start of file `file_index`; `byte_count` is without padding.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    file_index: int
    offset: int
    byte_count: int


@dataclass(frozen=True)
class Shard:
    """A whole model, or file `number` (from 0) of `split_count`."""

    path: Path
    fingerprint: Fingerprint
    number: int
    split_count: int
    alignment: int
    metadata: Metadata
    tensors: dict[str, TensorInfo]


def read_shard(path: Path, *, partial: bool = False) -> Shard:
    """Parse the head of one file. `partial`: what the head describes need not be there yet.

    ModelError where it cannot be opened, MalformedModel where it contradicts itself,
    UnsupportedModel for a version, byte order, value type or tensor type that we do not know.
    """
    with open_model_file(path) as fd:
        reader = HeaderReader(fd, path)
        fingerprint = Fingerprint.of_fd(fd)
        check_magic_and_version(reader)
        tensor_count = reader.number("Q")
        key_count = reader.number("Q")
        metadata = read_metadata(reader, fingerprint, key_count)
        split_count = metadata.optional("split.count", int, 1)
        number = metadata.optional("split.no", int, 0)
        if not 0 <= number < max(split_count, 1):
            raise reader.malformed(f"says it is split.no {number} of split.count {split_count}")
        alignment = _alignment(reader, metadata)
        tensors = _read_tensors(reader, tensor_count, number, alignment)
        _check_layout(path, tensors, None if partial else fingerprint.size_bytes)
    return Shard(path, fingerprint, number, max(split_count, 1), alignment, metadata, tensors)


def check_magic_and_version(reader: HeaderReader) -> None:
    if reader.remaining_bytes < len(MAGIC) or reader.raw(len(MAGIC)) != MAGIC:
        raise MalformedModel(f"{reader.path} is not a GGUF file", "name a .gguf model file")
    version = reader.number("I")
    if version in SUPPORTED_VERSIONS:
        return
    if version & 0xFFFF == 0:
        raise UnsupportedModel(
            f"{reader.path} is big-endian",
            "convert it with gguf-convert-endian, or download another",
        )
    raise UnsupportedModel(
        f"{reader.path} has GGUF version {version}; 2 and 3 are supported",
        "convert the model again with a newer converter"
        if version < SUPPORTED_VERSIONS[0]
        else "update this program or download another file",
    )


def _alignment(reader: HeaderReader, metadata: Metadata) -> int:
    alignment = metadata.optional("general.alignment", int, DEFAULT_ALIGNMENT)
    if not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise reader.malformed(f"general.alignment {alignment} is not a sane power of two")
    return alignment


def _read_tensors(
    reader: HeaderReader, tensor_count: int, file_index: int, alignment: int
) -> dict[str, TensorInfo]:
    if tensor_count > min(MAX_TENSORS, reader.remaining_bytes // MIN_TENSOR_ENTRY_BYTES):
        raise reader.malformed(f"claims {tensor_count:,} tensors")
    tensors: dict[str, TensorInfo] = {}
    for _ in range(tensor_count):
        tensor = read_tensor(reader, file_index)
        if tensor.name in tensors:
            raise reader.malformed(f"has the tensor {shown(tensor.name)} twice")
        if tensor.offset % alignment:
            raise reader.malformed(
                f"tensor {shown(tensor.name)} lies at {tensor.offset}, not aligned to {alignment}"
            )
        tensors[tensor.name] = tensor
    data_start = -(-reader.position // alignment) * alignment
    return {
        name: tensor._replace(offset=data_start + tensor.offset) for name, tensor in tensors.items()
    }


def read_tensor(reader: HeaderReader, file_index: int) -> TensorInfo:
    """The next tensor, its offset still counted from the data's start."""
    name = read_name(reader)
    dimension_count = reader.number("I")
    if not 1 <= dimension_count <= MAX_DIMENSIONS:
        raise reader.malformed(f"tensor {shown(name)} has {dimension_count} dimensions")
    shape = tuple(reader.number("Q") for _ in range(dimension_count))
    if 0 in shape:
        raise reader.malformed(f"tensor {shown(name)} is empty: shape {shape}")
    type_id = reader.number("I")
    offset = reader.number("Q")
    try:
        byte_count = row_bytes(type_id, shape[0]) * math.prod(shape[1:])
    except ModelError as error:
        raise type(error)(
            f"{reader.path}: tensor {shown(name)}: {error.message}", error.remedy
        ) from error
    return TensorInfo(name, shape, type_id, file_index, offset, byte_count)


def _check_layout(path: Path, tensors: dict[str, TensorInfo], file_bytes: int | None) -> None:
    """Every tensor inside the file (of `file_bytes`, if that matters) and none inside another."""
    before: TensorInfo | None = None
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        end = tensor.offset + tensor.byte_count
        if file_bytes is not None and end > file_bytes:
            raise MalformedModel(
                f"{path} is truncated: tensor {shown(tensor.name)} ends at byte {end:,}, the file"
                f" at {file_bytes:,}",
                "the download is incomplete; fetch the file again",
            )
        if before is not None and before.offset + before.byte_count > tensor.offset:
            raise MalformedModel(
                f"{path}: tensors {shown(before.name)} and {shown(tensor.name)} overlap",
                "convert or download the model again",
            )
        before = tensor
