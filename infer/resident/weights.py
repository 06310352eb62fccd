"""The resident tensors by name, read in place from the daemon's shared memory."""

import ctypes
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from infer.kernels.quant_matrix import QuantMatrix
from shared.errors import ConfigError, MalformedModel, UnsupportedModel
from shared.gguf_shard import TensorInfo
from shared.quants import TensorType
from shared.resident import ResidentLayout

_REMEDY = "convert or download the model again"


class Weights:
    """`layout` of the region that begins at `base_address` on `device`; `keepalive` keeps it, and
    what is added later."""

    def __init__(
        self,
        path: Path,
        layout: ResidentLayout,
        base_address: int,
        keepalive: object,
        device: torch.device,
    ) -> None:
        self.device = device
        self._path = path
        self._keepalive = keepalive
        self._placed: dict[str, tuple[TensorInfo, int]] = {}
        self.add(layout, base_address)

    def add(self, layout: ResidentLayout, base_address: int) -> None:
        """The tensors of another region; regions of layers that take turns may be the same."""
        self._placed |= {
            placed.tensor.name: (placed.tensor, base_address + placed.payload_offset)
            for placed in layout.tensors
        }

    def __contains__(self, name: str) -> bool:
        return name in self._placed

    def names_by_address(self) -> dict[int, str]:
        """ConfigError where some tensors take turns at an address."""
        names = {address: name for name, (_, address) in self._placed.items()}
        if len(names) < len(self._placed):
            raise ConfigError(
                "what is computed cannot be watched while layers are streamed to the GPU",
                "give --device cpu, or more GPU memory",
            )
        return names

    def matrix(self, name: str, rows: int, columns: int) -> QuantMatrix:
        """A matrix of any type, in place. MalformedModel if it is missing or of another shape."""
        tensor, address = self._find(name, (columns, rows))
        return QuantMatrix(tensor.type_id, rows, columns, address, self._keepalive)

    def matrices(self, name: str, count: int, rows: int, columns: int) -> list[QuantMatrix]:
        """As `matrix`, of a tensor that is a stack of `count` of them."""
        tensor, address = self._find(name, (columns, rows, count))
        whole = QuantMatrix(tensor.type_id, count * rows, columns, address, self._keepalive)
        return [whole.part(number * rows, rows) for number in range(count)]

    def vector(self, name: str, size: int) -> Tensor:
        """A float32 vector, copied: norms and biases are small."""
        tensor, address = self._find(name, (size,))
        if tensor.type_id != TensorType.F32:
            raise UnsupportedModel(
                f"{self._path}: {name} is not F32", "convert the model with F32 norms and biases"
            )
        if self.device.type == "cuda":
            return torch.as_tensor(_DeviceFloats(address, size), device=self.device).clone()
        source = (ctypes.c_float * size).from_address(address)
        return torch.from_numpy(np.frombuffer(source, np.float32).copy())

    def first(self, *names: str) -> str:
        """The first of several names (dialects) that is there; MalformedModel if none is."""
        for name in names:
            if name in self._placed:
                return name
        raise MalformedModel(f"{self._path} lacks the tensor {names[0]}", _REMEDY)

    def _find(self, name: str, shape: tuple[int, ...]) -> tuple[TensorInfo, int]:
        tensor, address = self._placed[self.first(name)]
        if tensor.shape != shape:
            raise MalformedModel(
                f"{self._path}: tensor {name} has shape {tensor.shape}, not {shape}", _REMEDY
            )
        return tensor, address


class _DeviceFloats:
    """Floats at a device address, as torch takes them (the CUDA array interface, version 3)."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "<f4",
            "data": (address, False),  # torch takes nothing that is read-only
            "version": 3,
        }
