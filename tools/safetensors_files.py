"""Read the weights of a Hugging Face checkpoint: safetensors files, one or many.

    header length u64 | header: JSON {name: {dtype, shape, data_offsets: [begin, end]}} | data

Offsets count from the header's end. `model.safetensors.index.json` says which file has a tensor.
Weights in 8-bit floats come with a scale: NAME_scale_inv or NAME_scale, one value for all, one a
row, or one a block of `weight_block_size` rows and columns; a weight is its float times its scale.
"""

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.errors import MalformedModel, ModelError, ReadFailed, UnsupportedModel

MAX_HEADER_BYTES = 128 << 20
MAX_FILES = 1 << 12
SCALE_SUFFIXES = ("_scale_inv", "_scale")
_REMEDY = "download the checkpoint again"


def _float8_table(exponent_bits: int, mantissa_bits: int, *, finite_only: bool) -> np.ndarray:
    """The values of all 256 codes of an 8-bit float (OCP OFP8); float32 [256].

    finite_only: E4M3FN, whose highest exponent has numbers too and NaN is all ones.
    """
    codes = np.arange(256)
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = codes & (1 << mantissa_bits) - 1
    bias = (1 << exponent_bits - 1) - 1
    fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
    values = np.ldexp(fraction, np.maximum(exponent, 1) - bias)
    top = exponent == (1 << exponent_bits) - 1
    if finite_only:
        values[top & (mantissa == (1 << mantissa_bits) - 1)] = np.nan
    else:
        values[top] = np.where(mantissa[top] > 0, np.nan, np.inf)
    return np.where(codes & 128, -values, values).astype(np.float32)


_FLOAT8 = {
    "F8_E4M3": _float8_table(4, 3, finite_only=True),
    "F8_E5M2": _float8_table(5, 2, finite_only=False),
}
_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
}


@dataclass(frozen=True)
class StoredTensor:
    """`shape` in numpy's order (rows before columns); `offset` from the file's start."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Checkpoint:
    """A folder of safetensors files, or one file. `config` is config.json's content."""

    def __init__(self, folder: Path) -> None:
        """ModelError where it cannot be read, MalformedModel where it contradicts itself."""
        self.folder = folder
        self.config: dict[str, Any] = read_json(folder / "config.json")
        self.tensors: dict[str, StoredTensor] = {}
        self._descriptors: dict[Path, int] = {}
        for path in _weight_files(folder):
            self.tensors |= _read_header(path)

    def close(self) -> None:
        for fd in self._descriptors.values():
            os.close(fd)
        self._descriptors.clear()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(tensor.path for tensor in self.tensors.values()))

    def weight_names(self) -> set[str]:
        """All tensors but scales of others."""
        return {name for name in self.tensors if not self._is_scale(name)}

    def rows(self, name: str, first: int, last: int) -> NDArray[np.float32]:
        """Rows [first, last) of a tensor seen as [rows of all axes, columns], float32, scaled."""
        tensor = self.find(name)
        columns = tensor.shape[-1]
        values = self._floats(tensor, first * columns, last * columns).reshape(-1, columns)
        scale = next((name + s for s in SCALE_SUFFIXES if name + s in self.tensors), None)
        if scale is not None:
            values = values * self._scale_of_rows(tensor, scale, first, last)
        elif tensor.dtype in _FLOAT8:
            raise MalformedModel(
                f"{self.folder}: {name} is {tensor.dtype} without a scale", _REMEDY
            )
        return values

    def find(self, name: str) -> StoredTensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise MalformedModel(f"{self.folder} lacks the tensor {name}", _REMEDY)
        return tensor

    def _is_scale(self, name: str) -> bool:
        """Of a weight, or of activations or a KV cache (which are not quantised here)."""
        return name.endswith(("input_scale", "activation_scale", "k_scale", "v_scale")) or any(
            name.endswith(suffix) and name.removesuffix(suffix) in self.tensors
            for suffix in SCALE_SUFFIXES
        )

    def _scale_of_rows(
        self, tensor: StoredTensor, name: str, first: int, last: int
    ) -> NDArray[np.float32]:
        """Scales that broadcast over rows [first, last) of `tensor`: [rows or 1, columns or 1]."""
        stored = self.find(name)
        scale = self._floats(stored, 0, int(np.prod(stored.shape, dtype=int)))
        if scale.size == 1:
            return scale.reshape(1, 1)
        rows, columns = tensor.shape[-2:]
        matrices = int(np.prod(tensor.shape[:-2], dtype=int))
        numbers = np.arange(first, last)
        matrix, row = numbers // rows, numbers % rows
        if scale.size == matrices * rows:
            return scale[numbers].reshape(-1, 1)
        high, wide = self._block_size
        grid = (matrices, -(-rows // high), -(-columns // wide))
        if scale.size != np.prod(grid):
            raise MalformedModel(
                f"{self.folder}: {name} has shape {stored.shape}, which fits no"
                f" {high} x {wide} blocks of {tensor.shape}",
                _REMEDY,
            )
        spread = scale.reshape(grid)[matrix, row // high]
        return np.repeat(spread, wide, axis=1)[:, :columns]

    @cached_property
    def _block_size(self) -> tuple[int, int]:
        size = self.config.get("quantization_config", {}).get("weight_block_size") or (128, 128)
        if len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
            raise MalformedModel(f"{self.folder}: weight_block_size {size} is absurd", _REMEDY)
        return size[0], size[1]

    def _floats(self, tensor: StoredTensor, first: int, last: int) -> NDArray[np.float32]:
        """Values [first, last) of a tensor seen flat, without a scale."""
        dtype = _DTYPES[tensor.dtype]
        data = self._pread(
            tensor.path, (last - first) * dtype.itemsize, tensor.offset + first * dtype.itemsize
        )
        raw = np.frombuffer(data, dtype)
        if tensor.dtype in _FLOAT8:
            return _FLOAT8[tensor.dtype][raw]
        if tensor.dtype == "BF16":  # the upper half of a float32
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32)

    def _pread(self, path: Path, byte_count: int, offset: int) -> bytearray:
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        data = bytearray(byte_count)
        done = 0
        while done < byte_count:
            try:
                got = os.preadv(self._descriptors[path], [memoryview(data)[done:]], offset + done)
            except OSError as error:
                raise ReadFailed(
                    f"reading {path} failed: {error.strerror}", "check the disk"
                ) from error
            if not got:
                raise MalformedModel(f"{path} is truncated", _REMEDY)
            done += got
        return data


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ModelError where the file cannot be read, MalformedModel for other content."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"cannot open {path}: {error.strerror}", "name the model's folder"
        ) from error
    except ValueError as error:
        raise MalformedModel(f"{path} is not JSON: {error}", _REMEDY) from error
    if not isinstance(found, dict):
        raise MalformedModel(f"{path} is not a JSON object", _REMEDY)
    return found


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise MalformedModel(f"{index} has no weight_map", _REMEDY)
        paths = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not 0 < len(paths) <= MAX_FILES:
        raise ModelError(f"{folder} has {len(paths)} safetensors files", "name the model's folder")
    for path in paths:
        if not path.exists():
            raise MalformedModel(f"{path} is missing", "download all files of the checkpoint")
    return paths


def _read_header(path: Path) -> dict[str, StoredTensor]:
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        header_bytes = struct.unpack("<Q", head)[0] if len(head) == 8 else file_bytes
        if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
            raise MalformedModel(f"{path} is no safetensors file, or truncated", _REMEDY)
        try:
            entries = json.loads(file.read(header_bytes))
            entries.pop("__metadata__", None)
            return {
                name: _stored(path, entry, 8 + header_bytes, file_bytes)
                for name, entry in entries.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MalformedModel(f"{path} has a malformed header: {error}", _REMEDY) from error


def _stored(path: Path, entry: Mapping[str, Any], data_start: int, file_bytes: int) -> StoredTensor:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if dtype not in _DTYPES:
        raise UnsupportedModel(f"{path} has weights of {dtype}", "use a BF16 or FP8 checkpoint")
    if end - begin != int(np.prod(shape, dtype=int)) * _DTYPES[dtype].itemsize or begin < 0:
        raise ValueError(f"offsets {begin}-{end} do not fit shape {shape}")
    if data_start + end > file_bytes:
        raise ValueError("it is truncated")
    return StoredTensor(path, dtype, shape, data_start + begin)
