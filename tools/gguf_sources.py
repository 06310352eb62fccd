"""The contents of a GGUF model's tensors and keys, for tools that write it anew."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf_layout import RawValue
from gguf_quantize import dequantize
from numpy.typing import NDArray

from shared.errors import ModelChanged, ReadFailed
from shared.gguf_header import HeaderReader, open_model_file
from shared.gguf_index import GgufIndex, TensorInfo
from shared.gguf_values import read_name, read_value
from shared.quants import row_bytes

COPY_BYTES = 16 << 20


class GgufSource:
    """A model's file or files, open for reading. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.index = GgufIndex.open(path)
        self._descriptors = [os.open(p, os.O_RDONLY | os.O_CLOEXEC) for p in self.index.paths]

    def __enter__(self) -> "GgufSource":
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._descriptors:
            os.close(fd)

    def metadata(self) -> dict[str, Any]:
        """All keys as they stand in the file, but for those of splitting; and those that a dialect
        was read as."""
        path = self.index.paths[0]
        raw: dict[str, Any] = {}
        with open_model_file(path) as fd:
            reader = HeaderReader(fd, path)
            reader.skip(4 + 4 + 8)  # magic, version, tensor count
            for _ in range(reader.number("Q")):
                key = read_name(reader)
                start = reader.position
                read_value(reader, key)
                raw[key] = RawValue(os.pread(fd, reader.position - start, start))
        added = {key: value for key, value in self.index.metadata.items() if key not in raw}
        kept = {key: raw[key] for key in raw if not key.startswith("split.")}
        kept.pop("general.alignment", None)
        return kept | added

    def copy(self, tensor: TensorInfo) -> Iterator[NDArray[np.uint8]]:
        """A tensor's bytes, in pieces."""
        for done in range(0, tensor.byte_count, COPY_BYTES):
            yield self._read(tensor, done, min(COPY_BYTES, tensor.byte_count - done))

    def rows(self, tensor: TensorInfo, matrix: int, first: int, last: int) -> NDArray[np.float32]:
        """Rows [first, last) of one expert or head, dequantised: float32 [rows, columns]."""
        columns = tensor.shape[0]
        size = row_bytes(tensor.type_id, columns)
        row = matrix * math.prod(tensor.shape[1:2]) + first
        data = self._read(tensor, row * size, (last - first) * size)
        return dequantize(data.reshape(-1, size), tensor.type_id, columns)

    def _read(self, tensor: TensorInfo, start: int, byte_count: int) -> NDArray[np.uint8]:
        path = self.index.paths[tensor.file_index]
        data = np.empty(byte_count, np.uint8)
        done = 0
        while done < byte_count:
            position = tensor.offset + start + done
            try:
                got = os.preadv(
                    self._descriptors[tensor.file_index], [memoryview(data)[done:]], position
                )
            except OSError as error:
                raise ReadFailed(
                    f"reading {path} at {position} failed: {error.strerror}", "check the disk"
                ) from error
            if not got:
                raise ModelChanged(f"{path} shrank while it was read", "try again")
            done += got
        return data
