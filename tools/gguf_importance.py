"""Importance matrices: how much each input column of a matrix matters, from real activations.

llama.cpp's GGUF form, which its quantiser reads too:

    general.type = "imatrix"    imatrix.datasets [text]    imatrix.chunk_count    imatrix.chunk_size
    NAME.in_sum2   F32 [columns, matrices]    sum of x^2 of each input column, over all tokens
    NAME.counts    F32 [1, matrices]          tokens that went through each matrix

where NAME is the tensor's, and matrices its experts (1 for a plain matrix).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf_layout import TensorPlan
from gguf_writing import ResumableFile
from numpy.typing import NDArray

from shared.errors import MalformedModel, ModelError
from shared.gguf_shard import TensorInfo, read_shard
from shared.quants import TensorType

_REMEDY = "make it again with tools/gguf_imatrix.py or llama-imatrix"


@dataclass(frozen=True, eq=False)
class Sums:
    """in_sum2 float32 [matrices, columns]; counts float32 [matrices]."""

    in_sum2: NDArray[np.float32]
    counts: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Importance:
    path: Path
    datasets: tuple[str, ...]
    chunk_count: int
    chunk_size: int
    sums: Mapping[str, Sums]

    def __contains__(self, name: str) -> bool:
        """Whether anything went through the tensor at all."""
        return name in self.sums and bool(self.sums[name].counts.any())

    def columns(self, name: str, columns: int, matrices: int) -> NDArray[np.float32] | None:
        """Mean squares float32 [matrices, columns] of a tensor, None where it is not known.

        A matrix (an expert) that no token reached gets the mean of those that were reached.
        MalformedModel where the file's tensor is of another shape.
        """
        if name not in self:
            return None
        found = self.sums[name]
        if found.in_sum2.shape != (matrices, columns):
            raise MalformedModel(
                f"{self.path} has {name} with {found.in_sum2.shape[0]} x {found.in_sum2.shape[1]}"
                f" inputs, the model with {matrices} x {columns}",
                "use the importance matrix of this model",
            )
        seen = found.counts > 0
        means = np.empty_like(found.in_sum2)
        means[seen] = found.in_sum2[seen] / found.counts[seen, np.newaxis]
        means[~seen] = means[seen].mean(0)
        return means

    @classmethod
    def open(cls, path: Path) -> "Importance":
        """MalformedModel for a file that is no importance matrix."""
        shard = read_shard(path)
        keys = shard.metadata
        if keys.get("general.type") != "imatrix":
            raise MalformedModel(f"{path} is no importance matrix", _REMEDY)
        names = sorted(
            name.removesuffix(".in_sum2") for name in shard.tensors if name.endswith(".in_sum2")
        )
        with path.open("rb") as file:

            def read(name: str) -> NDArray[np.float32]:
                return _floats(file, path, shard.tensors, name)

            sums = {}
            for name in names:
                in_sum2, counts = read(f"{name}.in_sum2"), read(f"{name}.counts").reshape(-1)
                if len(in_sum2) != len(counts) or not np.isfinite(in_sum2).all():
                    raise MalformedModel(f"{path}: {name} contradicts itself", _REMEDY)
                sums[name] = Sums(in_sum2, counts)
        return cls(
            path,
            tuple(keys.get("imatrix.datasets", ())),
            keys.optional("imatrix.chunk_count", int, 0),
            keys.optional("imatrix.chunk_size", int, 0),
            sums,
        )

    def write(self) -> None:
        metadata = {
            "general.type": "imatrix",
            "imatrix.datasets": list(self.datasets),
            "imatrix.chunk_count": self.chunk_count,
            "imatrix.chunk_size": self.chunk_size,
        }
        arrays: dict[str, NDArray[np.float32]] = {}
        for name, sums in sorted(self.sums.items()):
            arrays[f"{name}.in_sum2"] = np.ascontiguousarray(sums.in_sum2, np.float32)
            arrays[f"{name}.counts"] = np.ascontiguousarray(sums.counts[:, None], np.float32)
        plans = [
            TensorPlan(name, array.shape[::-1], int(TensorType.F32))
            for name, array in arrays.items()
        ]
        with ResumableFile(self.path, metadata, plans, (), restart=True) as file:
            for array in arrays.values():
                file.write([array])
            file.finish()

    def unseen(self) -> Iterator[tuple[str, int, int]]:
        """(name, matrices no token reached, matrices) of the tensors that have such."""
        for name, sums in self.sums.items():
            missing = int((sums.counts == 0).sum())
            if missing:
                yield name, missing, len(sums.counts)


def _floats(file, path: Path, tensors: Mapping[str, TensorInfo], name: str) -> NDArray[np.float32]:
    """An F32 tensor as float32 [rows, columns]."""
    tensor = tensors.get(name)
    if tensor is None or tensor.type_id != TensorType.F32:
        raise MalformedModel(f"{path} lacks {name} in F32", _REMEDY)
    file.seek(tensor.offset)
    raw = file.read(tensor.byte_count)
    if len(raw) != tensor.byte_count:
        raise ModelError(f"{path} shrank while it was read", "try again")
    return np.frombuffer(raw, np.float32).reshape(-1, tensor.shape[0])
