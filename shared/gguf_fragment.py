"""What can be read of a GGUF file whose header does not end: for looking, never for serving.

A download that has just begun ends inside its metadata or its list of tensors; a shard without its
siblings has a part of both. Everything in front of that place is as good as in a whole file.
"""

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shared.errors import ModelError
from shared.fingerprint import Fingerprint
from shared.gguf_header import HeaderReader, open_model_file
from shared.gguf_index import GgufIndex
from shared.gguf_shard import (
    DEFAULT_ALIGNMENT,
    MAX_TENSORS,
    TensorInfo,
    check_magic_and_version,
    read_tensor,
)
from shared.gguf_values import MAX_KEYS, Metadata, read_name, read_value

UNKNOWN_ARCHITECTURE = "?"


@dataclass(frozen=True)
class Fragment:
    """index: what there is; tensors' offsets count from the data's start, wherever that is.

    key_count, tensor_count: what the header promises. fault: where and why reading ended.
    """

    index: GgufIndex
    key_count: int
    tensor_count: int
    fault: str


def read_fragment(path: Path) -> Fragment:
    """Raises only for what is no GGUF file of a known version, or cannot be opened or read."""
    with open_model_file(path) as fd:
        reader = HeaderReader(fd, path)
        fingerprint = Fingerprint.of_fd(fd)
        check_magic_and_version(reader)
        tensor_count, key_count = reader.number("Q"), reader.number("Q")
        entries: dict[str, Any] = {}
        tensors: dict[str, TensorInfo] = {}
        fault = ""
        try:
            for _ in range(min(key_count, MAX_KEYS)):
                key = read_name(reader)
                entries[key] = read_value(reader, key)
            for _ in range(min(tensor_count, MAX_TENSORS)):
                tensor = read_tensor(reader, 0)
                tensors[tensor.name] = tensor
        except ModelError as error:
            fault = error.message
    architecture = entries.get("general.architecture")
    index = GgufIndex(
        paths=(path,),
        fingerprints=(fingerprint,),
        alignment=DEFAULT_ALIGNMENT,
        architecture=architecture if isinstance(architecture, str) else UNKNOWN_ARCHITECTURE,
        metadata=Metadata(path, fingerprint, entries),
        tensors=MappingProxyType(tensors),
    )
    return Fragment(index, key_count, tensor_count, fault)
