"""A whole GGUF model, in one file or split over several: its metadata and where its tensors lie."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Self, TypeVar

from shared import hy3_dialect
from shared.errors import MalformedModel
from shared.fingerprint import Fingerprint
from shared.gguf_header import shown
from shared.gguf_shard import Shard, TensorInfo, read_shard
from shared.gguf_values import Metadata

__all__ = ["GgufIndex", "TensorInfo"]

MAX_SHARDS = 1 << 10

# File names count from 1, `split.no` from 0. Shard 1 holds the metadata.
_SHARD_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)

T = TypeVar("T")


@dataclass(frozen=True)
class GgufIndex:
    """What a model file says about itself; nothing of its tensors' contents.

    `paths` and `fingerprints` have one entry a shard, `TensorInfo.file_index` points into them.
    `alignment` is the first shard's; offsets are absolute, so nobody needs it to find a tensor.
    `mtp`: whether the MTP block behind the trunk belongs to what is served: see shared/mtp.py.
    """

    paths: tuple[Path, ...]
    fingerprints: tuple[Fingerprint, ...]
    alignment: int
    architecture: str
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]
    mtp: bool = False

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, partial: bool = False) -> Self:
        """Index the model that `path` names: its only file, or any of its shards.

        `partial` takes files whose tensors are not (all) there: a header alone, a download that
        has not ended. Nothing can be served from such an index.

        ModelError where a file cannot be opened, MalformedModel where one contradicts itself or
        the others, UnsupportedModel for a format, value type or tensor type that we do not know,
        ReadFailed where the disk fails.
        """
        # Not resolved: in a cache of symbolic links the shards' names are the links'.
        given = read_shard(Path(os.path.abspath(path)), partial=partial)
        shards = [given] if given.split_count == 1 else _read_split(given, partial)
        first = shards[0]
        architecture = first.metadata.require("general.architecture", str)
        metadata, tensors = hy3_dialect.translate(
            architecture, first.metadata, _merge_tensors(shards)
        )
        return cls(
            paths=tuple(shard.path for shard in shards),
            fingerprints=tuple(shard.fingerprint for shard in shards),
            alignment=first.alignment,
            architecture=architecture,
            metadata=metadata,
            tensors=MappingProxyType(tensors),
        )

    def require(self, key: str, kind: type[T]) -> T:
        """The value of `key`; MalformedModel where it is missing or not of `kind`."""
        return self.metadata.require(key, kind)

    def optional(self, key: str, kind: type[T], default: T) -> T:
        """The value of `key` or `default`; MalformedModel where it is there and not of `kind`."""
        return self.metadata.optional(key, kind, default)

    def arch_key(self, name: str, kind: type[T]) -> T:
        """`require` for `<architecture>.<name>`."""
        key = f"{self.architecture}.{name}"
        if key not in self.metadata:
            raise MalformedModel(
                f"{self.paths[0]}, of architecture {shown(self.architecture)},"
                f" lacks the key {shown(key)}",
                "use a mixture-of-experts model of a known architecture, or convert this one again",
            )
        return self.require(key, kind)

    def arch_optional(self, name: str, kind: type[T], default: T) -> T:
        """`optional` for `<architecture>.<name>`."""
        return self.optional(f"{self.architecture}.{name}", kind, default)

    def check_unchanged(self) -> None:
        """ModelChanged if any file is gone, replaced or rewritten since it was opened."""
        for path, fingerprint in zip(self.paths, self.fingerprints, strict=True):
            fingerprint.check_path(path)


def _read_split(given: Shard, partial: bool) -> list[Shard]:
    """All shards in order, `given` being one of them."""
    count = given.split_count
    if count > MAX_SHARDS:
        raise MalformedModel(
            f"{given.path} claims to be split into {count:,} files", "download the model again"
        )
    name = _SHARD_NAME.fullmatch(given.path.name)
    if name is None or (int(name[2]), int(name[3])) != (given.number + 1, count):
        raise MalformedModel(
            f"{given.path} is shard {given.number + 1} of {count}, but its name says otherwise",
            f"give the shards their names back: NAME-{given.number + 1:05}-of-{count:05}.gguf",
        )
    shards = []
    for number in range(count):
        path = given.path.with_name(f"{name[1]}-{number + 1:05}-of-{count:05}.gguf")
        shard = given if number == given.number else _read_sibling(path, number, count, partial)
        shards.append(shard)
    expected = shards[0].metadata.optional("split.tensors.count", int, -1)
    found = sum(len(shard.tensors) for shard in shards)
    if expected not in (-1, found):
        raise MalformedModel(
            f"the {count} shards of {shards[0].path} have {found} tensors, not {expected}",
            "download all shards of one and the same model",
        )
    return shards


def _read_sibling(path: Path, number: int, count: int, partial: bool) -> Shard:
    if not path.exists():
        raise MalformedModel(
            f"shard {number + 1} of {count} is missing: {path}", "put all shards in one directory"
        )
    shard = read_shard(path, partial=partial)
    if (shard.number, shard.split_count) != (number, count):
        raise MalformedModel(
            f"{path} says it is shard {shard.number + 1} of {shard.split_count}",
            "download all shards of one and the same model",
        )
    return shard


def _merge_tensors(shards: list[Shard]) -> dict[str, TensorInfo]:
    merged: dict[str, TensorInfo] = {}
    for shard in shards:
        for name in shard.tensors:
            if name in merged:
                raise MalformedModel(
                    f"{shard.path} has the tensor {shown(name)} of another shard again",
                    "download all shards of one and the same model",
                )
        merged |= shard.tensors
    return merged
