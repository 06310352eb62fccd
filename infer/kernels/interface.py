"""What a device must be able to compute: the contract of `GgmlKernels` and `ReferenceKernels`.

Tensors are contiguous float32 on the kernels' device unless said otherwise. `n` counts tokens.
Kernels keep scratch memory: one caller at a time. `exact` asks for float32 arithmetic on
dequantised weights; without it an implementation may quantise activations.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from infer.kernels.quant_matrix import QuantMatrix


class MatrixGroup(Protocol):
    """Matrices that share their input, prepared by the `Kernels` that multiply by them."""

    @property
    def matrices(self) -> tuple[QuantMatrix, ...]: ...


class HeadMatrices(Protocol):
    """A matrix for each head, prepared by the `Kernels` that multiply by them."""

    @property
    def matrices(self) -> tuple[QuantMatrix, ...]: ...


class ExpertFormat(NamedTuple):
    """What the experts of one layer have in common: tensor type ids and widths."""

    gate_type: int
    up_type: int
    down_type: int
    d_model: int
    d_ff: int


class ExpertBatch(NamedTuple):
    """Which expert works on which pair, where a pair is a (token, rank) of the router's choice.

    `pairs` int32 [P] are flat indices token * top_k + rank, those of one expert next to each other;
    expert g has pairs[group_start[g] : group_start[g + 1]] (`group_start` int32 [G + 1]) and its
    weights lie at the addresses gate[g], up[g], down[g] (int64 [G] each).
    """

    format: ExpertFormat
    pairs: np.ndarray
    group_start: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray


class Kernels(Protocol):
    def group(self, matrices: Sequence[QuantMatrix]) -> MatrixGroup:
        """Prepare 1 to 8 matrices with the same number of columns for `linear`.

        UnsupportedModel where a tensor type cannot be multiplied.
        """

    def linear(
        self,
        x: Tensor,
        group: MatrixGroup,
        exact: bool = False,
        out: Sequence[Tensor] | None = None,
    ) -> Sequence[Tensor]:
        """x [n, columns] -> for each matrix x W^T [n, rows]."""

    def experts(self, x: Tensor, batch: ExpertBatch, out: Tensor, exact: bool = False) -> Tensor:
        """SwiGLU of each pair, down(silu(gate x) * (up x)), not weighted.

        x [n, d_model]; out [n, top_k, d_model], of which only the rows in `batch.pairs` are
        written, so that several batches (hits first, misses later) fill one `out`.
        """

    def swiglu(
        self, x: Tensor, gate: QuantMatrix, up: QuantMatrix, down: QuantMatrix, exact: bool = False
    ) -> Tensor:
        """One gated block for all tokens: x [n, columns of gate] -> [n, rows of down]."""

    def embed(self, matrix: QuantMatrix, ids: Tensor) -> Tensor:
        """ids int64 [n], within the matrix's rows -> its dequantised rows [n, columns]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis; `out` may be x itself."""

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, start: int) -> None:
        """Rotate x [n, heads, head_dim] in place; row i stands at position start + i.

        cos, sin [positions, r / 2] are tables by position. The halves of the first r values of a
        head are rotated against each other (rotate-half, "NeoX"); values beyond r stay.
        """

    def rope_pairs(self, x: Tensor, cos: Tensor, sin: Tensor, start: int, first: int = 0) -> None:
        """As `rope` for values `first` to `first` + r of a head, r = 2 * columns of `cos`, where
        neighbours, (0, 1), (2, 3) and so on, are rotated against each other ("interleaved")."""

    def attention(
        self, q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float
    ) -> Tensor:
        """Causal grouped-query attention over a cache: [n, heads, head_dim] -> the same shape.

        keys, values [context, kv_heads, head_dim], float32 or float16; row i of q stands at
        position start + i and sees the positions up to and including its own, which the caller has
        stored. Query head h reads kv head h // (heads / kv_heads). Softmax in float32.
        """

    def heads(self, matrices: Sequence[QuantMatrix]) -> HeadMatrices:
        """Prepare matrices, one a head, of one type and shape, for `per_head`."""

    def per_head(self, x: Tensor, matrices: HeadMatrices, exact: bool = False) -> Tensor:
        """x [n, heads, columns] -> for each head x W^T with its own W: [n, heads, rows]."""

    def latent_attention(
        self,
        q: Tensor,
        latent: Tensor,
        value_width: int,
        start: int,
        scale: float,
        selected: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of many heads over one key a position: [n, heads, value_width].

        q [n, heads, width], latent [context, width] of the cache's type: a position's key, whose
        first `value_width` numbers are its value too (DeepSeek-V2, section 2.1.2, absorbed form).
        Row i stands at position start + i and sees the positions up to and including its own; of
        these, with `selected` as `select` gives it, only the first min(top_k, start + i + 1) named
        in selected[i]. Softmax in float32.
        """

    def select(self, q: Tensor, weights: Tensor, keys: Tensor, start: int, top_k: int) -> Tensor:
        """The positions a sparse attention reads: int32 [n, top_k].

        q [n, heads, width], weights [n, heads], keys [context, width] of the cache's type. Position
        j has the score sum over h of weights[h] * relu(q[h] . keys[j]) (DeepSeek-V3.2, eq. 1). Row
        i gets the top_k best of the positions up to start + i, ties to the lower one, in ascending
        order. Where there are no more than top_k, it is 0 .. top_k - 1: all, then later ones.
        """

    def route_sigmoid(
        self, logits: Tensor, bias: Tensor | None, top_k: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """logits [n, experts] -> (ids int32 [n, top_k], weights [n, top_k]).

        p = sigmoid(logits); ids = the largest p + bias, descending, ties to the lower index;
        weights = p[ids] / (sum p[ids] + 1e-20) * scale.
        """

    def weighted_sum(self, rows: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        """rows [n, k, d], weights [n, k], shared [n, d] -> sum over k, in order, then + shared."""
