"""A conversation's KV cache in a file.

    0    magic "STREAMKV"
    8    version       u32   little-endian, as all that follows
    12   head_bytes    u32
    16   head_checksum u64   xxh3 of the head
    24   head          msgpack of the fields of `Head`; token ids int32
         block 0       the first `block_tokens` positions of each plane, one plane after the other:
                       [layers, positions, ...]
         checksum      u64   xxh3 of the block, seeded with head_checksum + its number
         block 1 ...         the last one has what positions are left

A block has a checksum of its own, so that a part of the conversation can be verified without
reading the rest; the seed binds it to its place in this file.
"""

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np
import torch
import xxhash
from torch import Tensor

from shared.errors import RequestError
from shared.user_files import replacing

MAGIC = b"STREAMKV"
VERSION = 1
SUFFIX = ".kv"
_FIXED = struct.Struct("<8sIIQ")
_CHECKSUM = struct.Struct("<Q")
MAX_HEAD_BYTES = 64 << 20
_BLOCK_BYTES = 16 << 20

Planes = Mapping[str, Tensor]


@dataclass(frozen=True)
class Identity:
    """What must be the same for a cache to be of use. All of it is plain data.

    model: size, inode and time of each of its files. planes: name, type, layers and the shape of a
    position of each. arithmetic: the device and whether exact. template: hash of the chat template.
    """

    model: list[list[int]]
    planes: list[list[Any]]
    arithmetic: list[Any]
    template: str

    def difference(self, other: "Identity") -> tuple[str, str]:
        """How a cache of `other` was made, unlike one of this; and what to do to use it."""
        if self.model != other.model:
            return "with another model file, or before this one was replaced", "open that model"
        if self.arithmetic[1:] != other.arithmetic[1:]:
            word = "with" if other.arithmetic[1] else "without"
            return f"{word} --exact", f"start again {word} --exact"
        if self.arithmetic != other.arithmetic:
            device = other.arithmetic[0]
            return f"on the device {device}", f"start again with --device {device}"
        if self.template != other.template:
            return "with another chat template", "start again with the one that it was saved with"
        return "with another layout of the KV cache", "start again with the options of that time"

    @property
    def digest(self) -> str:
        packed: bytes = msgpack.packb(asdict(self))
        return xxhash.xxh3_128_hexdigest(packed)


@dataclass(frozen=True)
class Head:
    """talk: what the conversation is beside its tokens; plain data that is only carried here."""

    identity: Identity
    ids: tuple[int, ...]
    block_tokens: int
    talk: dict[str, Any]

    def blocks(self, token_count: int) -> Iterator[tuple[int, int, int]]:
        """(number, first position, positions in it) of the blocks that `token_count` lie in."""
        for number, first in enumerate(range(0, token_count, self.block_tokens)):
            yield number, first, min(self.block_tokens, len(self.ids) - first)


def describe_planes(planes: Planes) -> list[list[Any]]:
    return [
        [name, str(plane.dtype), plane.shape[0], list(plane.shape[2:])]
        for name, plane in planes.items()
    ]


def token_bytes(planes: Planes) -> int:
    """What a position takes in all planes."""
    return sum(plane[:, 0].numel() * plane.dtype.itemsize for plane in planes.values())


def _block_tokens(planes: Planes) -> int:
    return max(1, _BLOCK_BYTES // token_bytes(planes))


def write(
    path: Path, identity: Identity, ids: Sequence[int], talk: dict[str, Any], planes: Planes
) -> None:
    """Write the first len(ids) positions of the planes; `path` appears when it is complete.

    OSError where it cannot be written; nothing is left of it then.
    """
    head = Head(identity, tuple(ids), _block_tokens(planes), talk)
    with replacing(path) as file:
        _write_all(file, head, planes)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write_all(file: BinaryIO, head: Head, planes: Planes) -> None:
    packed: bytes = msgpack.packb(
        asdict(head) | {"ids": np.array(head.ids, "<i4").tobytes()},
        unicode_errors="surrogatepass",
    )
    assert len(packed) <= MAX_HEAD_BYTES
    checksum = xxhash.xxh3_64_intdigest(packed)
    file.write(_FIXED.pack(MAGIC, VERSION, len(packed), checksum))
    file.write(packed)
    for number, first, count in head.blocks(len(head.ids)):
        digest = xxhash.xxh3_64(seed=_seed(checksum, number))
        for plane in planes.values():
            stretch = plane[:, first : first + count].contiguous().cpu()
            data = stretch.flatten().view(torch.uint8).numpy()
            digest.update(data)
            file.write(data)
        file.write(_CHECKSUM.pack(digest.intdigest()))


def _seed(head_checksum: int, number: int) -> int:
    return (head_checksum + number) % 2**64


class KvFile:
    """One file, open for reading; a context manager. RequestError where it is not sound."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        try:
            self.head = self._read_head()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "KvFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def restore(self, planes: Planes, token_count: int) -> None:
        """Read the first `token_count` positions into the planes, each block verified before."""
        head, row_bytes = self.head, token_bytes(planes)
        assert 0 <= token_count <= len(head.ids)
        if head.block_tokens > _block_tokens(planes):
            raise self._unsound("its blocks are too large")
        buffer = bytearray(min(head.block_tokens, len(head.ids)) * row_bytes + _CHECKSUM.size)
        place = self._blocks_at
        for number, first, count in head.blocks(token_count):
            size = count * row_bytes
            block = memoryview(buffer)[:size]
            self._file.seek(place)
            if self._file.readinto(memoryview(buffer)[: size + _CHECKSUM.size]) < (
                size + _CHECKSUM.size
            ):
                raise self._unsound("it ends too early")
            (expected,) = _CHECKSUM.unpack_from(buffer, size)
            if xxhash.xxh3_64_intdigest(block, seed=_seed(self._checksum, number)) != expected:
                raise self._unsound(f"the checksum of block {number} is wrong")
            _unpack(block, planes, first, count, min(count, token_count - first))
            place += size + _CHECKSUM.size

    def _read_head(self) -> Head:
        fixed = self._file.read(_FIXED.size)
        if len(fixed) < _FIXED.size or not fixed.startswith(MAGIC):
            raise self._unsound("it is no KV session")
        _, version, head_bytes, self._checksum = _FIXED.unpack(fixed)
        if version != VERSION:
            raise self._unsound(f"it is of version {version}, this is version {VERSION}")
        packed = self._file.read(min(head_bytes, MAX_HEAD_BYTES))
        if len(packed) != head_bytes or xxhash.xxh3_64_intdigest(packed) != self._checksum:
            raise self._unsound("the checksum of its head is wrong")
        self._blocks_at = _FIXED.size + head_bytes
        try:
            fields = msgpack.unpackb(packed, unicode_errors="surrogatepass")
            ids = tuple(np.frombuffer(fields["ids"], "<i4").tolist())
            identity = Identity(**fields["identity"])
            head = Head(identity, ids, int(fields["block_tokens"]), dict(fields["talk"]))
        except (ValueError, TypeError, KeyError, OverflowError, msgpack.UnpackException) as error:
            raise self._unsound(f"its head cannot be read: {error}") from error
        if head.block_tokens < 1 or not ids:
            raise self._unsound("its head makes no sense")
        return head

    def _unsound(self, why: str) -> RequestError:
        return RequestError(f"{self.path} is damaged or foreign: {why}", "delete it")


def _unpack(block: memoryview, planes: Planes, first: int, count: int, wanted_count: int) -> None:
    """Copy the first `wanted_count` of a block's `count` positions to those from `first` on."""
    place = 0
    for plane in planes.values():
        layers, _, *rest = plane.shape
        value_count = layers * count * plane[:1, :1].numel()
        if not value_count:
            continue
        values = torch.frombuffer(block, dtype=plane.dtype, count=value_count, offset=place)
        source = values.view(layers, count, *rest)[:, :wanted_count]
        plane[:, first : first + wanted_count] = source.to(plane.device)
        place += value_count * plane.dtype.itemsize
