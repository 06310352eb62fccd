"""`Kernels` on the torch reference: slow, for any device, and needing nothing but torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infer.kernels import reference
from infer.kernels.interface import ExpertBatch
from infer.kernels.quant_matrix import QuantMatrix

# Scores of as many queries as fit are there at once, whatever the prompt: 8 MiB.
_TILE_SCORES = 1 << 21


def _in_tiles(compute: Callable[[slice], Tensor], rows: int, row_scores: int) -> Tensor:
    """`compute` for some rows at a time. The last come first: each tile fits the memory that the
    larger one before it has left, where the allocator could use none the other way round."""
    step = max(1, _TILE_SCORES // row_scores)
    tiles = [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
    return torch.cat([compute(tile) for tile in reversed(tiles)][::-1])


@dataclass(frozen=True, slots=True)
class DenseGroup:
    """Matrices and what they dequantise to: resident weights take four bytes each here."""

    matrices: tuple[QuantMatrix, ...]
    weights: tuple[Tensor, ...]


class ReferenceKernels:
    """Always exact, so `exact` changes nothing. Methods are described in `interface.Kernels`."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def _dense(self, matrix: QuantMatrix) -> Tensor:
        return reference.dequantize(matrix).to(self._device)

    def group(self, matrices: Sequence[QuantMatrix]) -> DenseGroup:
        assert len({matrix.columns for matrix in matrices}) == 1
        return DenseGroup(tuple(matrices), tuple(map(self._dense, matrices)))

    def linear(
        self,
        x: Tensor,
        group: DenseGroup,
        exact: bool = False,  # noqa: ARG002
        out: Sequence[Tensor] | None = None,
    ) -> Sequence[Tensor]:
        results = [reference.linear(x, weight) for weight in group.weights]
        if out is None:
            return results
        for target, result in zip(out, results, strict=True):
            target.copy_(result)
        return out

    def experts(
        self,
        x: Tensor,
        batch: ExpertBatch,
        out: Tensor,
        exact: bool = False,  # noqa: ARG002
    ) -> Tensor:
        shape = batch.format
        top_k = out.shape[1]
        rows = out.view(-1, shape.d_model)
        pairs = torch.from_numpy(batch.pairs).long().to(self._device)
        for index, (gate, up, down) in enumerate(
            zip(batch.gate, batch.up, batch.down, strict=True)
        ):
            mine = pairs[batch.group_start[index] : batch.group_start[index + 1]]
            rows[mine] = self.swiglu(
                x[mine // top_k],
                QuantMatrix(shape.gate_type, shape.d_ff, shape.d_model, int(gate)),
                QuantMatrix(shape.up_type, shape.d_ff, shape.d_model, int(up)),
                QuantMatrix(shape.down_type, shape.d_model, shape.d_ff, int(down)),
            )
        return out

    def swiglu(
        self,
        x: Tensor,
        gate: QuantMatrix,
        up: QuantMatrix,
        down: QuantMatrix,
        exact: bool = False,  # noqa: ARG002
    ) -> Tensor:
        return reference.swiglu(x, self._dense(gate), self._dense(up), self._dense(down))

    def embed(self, matrix: QuantMatrix, ids: Tensor) -> Tensor:
        rows = matrix.blocks()[ids.cpu().numpy()]
        return self._dense(QuantMatrix.over(matrix.type_id, matrix.columns, rows))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        result = reference.rms_norm(x, weight, eps)
        return result if out is None else out.copy_(result)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, start: int) -> None:
        x.copy_(reference.rope_neox(x, cos, sin, start))

    def rope_pairs(self, x: Tensor, cos: Tensor, sin: Tensor, start: int, first: int = 0) -> None:
        x.copy_(reference.rope_pairs(x, cos, sin, start, first))

    def attention(
        self, q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float
    ) -> Tensor:
        return _in_tiles(
            lambda rows: reference.attention(q[rows], keys, values, start + rows.start, scale),
            len(q),
            q.shape[1] * (start + len(q)),
        )

    def heads(self, matrices: Sequence[QuantMatrix]) -> DenseGroup:
        return self.group(matrices)

    def per_head(
        self,
        x: Tensor,
        matrices: DenseGroup,
        exact: bool = False,  # noqa: ARG002
    ) -> Tensor:
        return reference.per_head(x, torch.stack(matrices.weights))

    def latent_attention(
        self,
        q: Tensor,
        latent: Tensor,
        value_width: int,
        start: int,
        scale: float,
        selected: Tensor | None = None,
    ) -> Tensor:
        def attend(rows: slice) -> Tensor:
            chosen = None if selected is None else selected[rows]
            position = start + rows.start
            return reference.latent_attention(q[rows], latent, value_width, position, scale, chosen)

        return _in_tiles(attend, len(q), q.shape[1] * (start + len(q)))

    def select(self, q: Tensor, weights: Tensor, keys: Tensor, start: int, top_k: int) -> Tensor:
        return _in_tiles(
            lambda rows: reference.select(q[rows], weights[rows], keys, start + rows.start, top_k),
            len(q),
            q.shape[1] * (start + len(q)),
        )

    def route_sigmoid(
        self, logits: Tensor, bias: Tensor | None, top_k: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        return reference.route_sigmoid(logits, bias, top_k, scale)

    def weighted_sum(self, rows: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        return reference.weighted_sum(rows, weights, shared)
