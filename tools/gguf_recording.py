"""Watches what goes into each matrix while a model computes: sums of squares by input column.

A `Recorder` is an instrument of infer's Engine: it puts its own kernels and expert source before
the real ones. Gated blocks are computed here, in float32, as the real kernels keep what goes into
`down` to themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gguf_importance import Sums
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import silu

from infer.families.parts import Parts
from infer.kernels.interface import ExpertBatch, HeadMatrices, Kernels, MatrixGroup
from infer.kernels.quant_matrix import QuantMatrix
from shared.experts import PARTS, ExpertIndex

UNPACK_ROWS = 64  # dequantised at once
# It sees a window's last token only: too few to weigh its columns by.
_OUTPUT = ("output.weight", "token_embd.weight")


class Recorder:
    """`sums` by tensor name. Gate and up of experts share their input, and so their sums."""

    def __init__(self) -> None:
        self.sums: dict[str, Sums] = {}
        self.names: dict[int, str] = {}
        self._experts: ExpertIndex | None = None

    def __call__(self, parts: Parts) -> Parts:
        self.names = parts.weights.names_by_address()
        for address in [at for at, name in self.names.items() if name in _OUTPUT]:
            del self.names[address]
        self._experts = parts.experts
        source = RecordingSource(parts.source)
        kernels = RecordingKernels(parts.kernels, self, source)
        return replace(parts, kernels=kernels, source=source)

    def add_matrix(self, matrix: QuantMatrix, x: Tensor) -> None:
        """x [n, columns] went into a resident matrix; those that are not in the file are left out,
        as is a matrix that is not a whole tensor."""
        name = self.names.get(matrix.address)
        if name is not None:
            self._sums(name, 1, matrix.columns).add(0, x)

    def add_heads(self, matrices: Sequence[QuantMatrix], x: Tensor) -> None:
        """x [n, heads, columns]"""
        name = self.names.get(matrices[0].address)
        if name is not None:
            sums = self._sums(name, len(matrices), matrices[0].columns)
            for head in range(len(matrices)):
                sums.add(head, x[:, head])

    def add_expert(self, layer: int, expert: int, x: Tensor, hidden: Tensor) -> None:
        """x [n, d_model] went into gate and up, hidden [n, d_ff] into down."""
        assert self._experts is not None
        names = [f"blk.{layer}.ffn_{part}_exps.weight" for part in PARTS]
        count = self._experts.n_experts
        gate = self._sums(names[0], count, x.shape[1])
        self.sums[names[1]] = gate
        gate.add(expert, x)
        self._sums(names[2], count, hidden.shape[1]).add(expert, hidden)

    def _sums(self, name: str, matrices: int, columns: int) -> "RunningSums":
        found = self.sums.get(name)
        if found is None:
            found = self.sums[name] = RunningSums.zeros(matrices, columns)
        assert isinstance(found, RunningSums)
        return found


class RunningSums(Sums):
    @classmethod
    def zeros(cls, matrices: int, columns: int) -> "RunningSums":
        return cls(np.zeros((matrices, columns), np.float32), np.zeros(matrices, np.float32))

    def add(self, matrix: int, x: Tensor) -> None:
        """x [n, columns], summed in float64."""
        self.in_sum2[matrix] += x.double().square().sum(0).cpu().numpy()
        self.counts[matrix] += len(x)


class RecordingSource:
    """Keeps `layer` and `experts` of the slabs that are being computed on."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.layer = -1
        self.experts: NDArray[np.integer[Any]] = np.empty(0, np.int32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(
        self,
        layer: int,
        experts: NDArray[np.integer[Any]],
        use_counts: NDArray[np.integer[Any]] | int,
        compute: Callable[[NDArray[np.intp], NDArray[np.int64]], None],
        meanwhile: Callable[[], None],
    ) -> None:
        def watched(places: NDArray[np.intp], addresses: NDArray[np.int64]) -> None:
            self.layer, self.experts = layer, experts[places]
            compute(places, addresses)

        self._source.read(layer, experts, use_counts, watched, meanwhile)


class RecordingKernels:
    """Everything that is not here the real kernels do."""

    def __init__(self, kernels: Kernels, recorder: Recorder, source: RecordingSource) -> None:
        self._kernels = kernels
        self._recorder = recorder
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def linear(
        self,
        x: Tensor,
        group: MatrixGroup,
        exact: bool = False,
        out: Sequence[Tensor] | None = None,
    ) -> Sequence[Tensor]:
        for matrix in group.matrices:
            self._recorder.add_matrix(matrix, x)
        return self._kernels.linear(x, group, exact, out)

    def per_head(self, x: Tensor, matrices: HeadMatrices, exact: bool = False) -> Tensor:
        self._recorder.add_heads(matrices.matrices, x)
        return self._kernels.per_head(x, matrices, exact)

    def swiglu(
        self, x: Tensor, gate: QuantMatrix, up: QuantMatrix, down: QuantMatrix, **_: bool
    ) -> Tensor:
        hidden = self._hidden(x, gate, up)
        for matrix, values in ((gate, x), (up, x), (down, hidden)):
            self._recorder.add_matrix(matrix, values)
        return hidden @ self._unpacked(down, x.device).T

    def experts(self, x: Tensor, batch: ExpertBatch, out: Tensor, _exact: bool) -> Tensor:
        form, flat = batch.format, out.view(-1, out.shape[-1])
        top_k = out.shape[1]
        for number, expert in enumerate(self._source.experts.tolist()):
            pairs = batch.pairs[batch.group_start[number] : batch.group_start[number + 1]]
            places = torch.from_numpy(pairs.astype(np.int64)).to(x.device)
            inputs = x[places // top_k]
            gate, up, down = (
                QuantMatrix(kind, rows, columns, int(addresses[number]))
                for kind, rows, columns, addresses in (
                    (form.gate_type, form.d_ff, form.d_model, batch.gate),
                    (form.up_type, form.d_ff, form.d_model, batch.up),
                    (form.down_type, form.d_model, form.d_ff, batch.down),
                )
            )
            hidden = self._hidden(inputs, gate, up)
            self._recorder.add_expert(self._source.layer, expert, inputs, hidden)
            flat[places] = hidden @ self._unpacked(down, x.device).T
        return out

    def _hidden(self, x: Tensor, gate: QuantMatrix, up: QuantMatrix) -> Tensor:
        return silu(x @ self._unpacked(gate, x.device).T) * (x @ self._unpacked(up, x.device).T)

    def _unpacked(self, matrix: QuantMatrix, device: torch.device) -> Tensor:
        """float32 [rows, columns]; an embedding's look-up is what dequantises rows everywhere."""
        rows = torch.arange(matrix.rows, device=device).split(UNPACK_ROWS)
        return torch.cat([self._kernels.embed(matrix, part) for part in rows])
