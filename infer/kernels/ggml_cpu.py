"""`Kernels` for the CPU: ggml's functions in compiled loops over torch's threads.

Importing this module compiles the loops, or loads them from the cache of an earlier run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from infer.kernels import ggml_library
from infer.kernels.ggml_activations import Activations
from infer.kernels.ggml_attention import GgmlAttention
from infer.kernels.ggml_experts import GgmlExperts
from infer.kernels.ggml_heads import GgmlHeadMatrices
from infer.kernels.ggml_linear import GgmlGroup, GgmlLinear
from infer.kernels.ggml_rows import GgmlRows
from infer.kernels.interface import ExpertBatch, ExpertFormat
from infer.kernels.matmul_tasks import Matmul
from infer.kernels.pieces import piece_values
from infer.kernels.program import Recorder
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.scratch import KernelBounds, Scratch
from infer.kernels.thread_team import ThreadTeam
from infer.kernels.tiled_matmul import TiledMatmul
from shared.quants import TensorType


class GgmlKernels:
    """Methods are described in `interface.Kernels`; tensors are on the CPU.

    Nothing is allocated in a call but its result. The default arithmetic quantises activations to
    8 bit (16 bit beside 16-bit weights, none beside F32); `exact` dequantises weights instead. Bits
    depend on neither the threads nor what else is in a call, but for many tokens in the default
    arithmetic: those are multiplied as `tiled_matmul` says, and their number matters.
    """

    def __init__(
        self, bounds: KernelBounds, threads: int | None = None, tiles: bool | None = None
    ) -> None:
        """For calls within `bounds`; `threads` by default as many as there are processors.

        tiles: whether many tokens are multiplied by `TiledMatmul`; by default where it is fast.

        ConfigError where ggml's library cannot be used on this machine.
        """
        library = ggml_library.load()
        team = ThreadTeam(threads)
        scratch = Scratch()
        inputs = piece_values(bounds.columns, bounds.tokens)
        activations = Activations(library, team, scratch, inputs)
        tiled = TiledMatmul(library, team.threads, tiles)
        matmul = Matmul(team, scratch, max(bounds.columns, bounds.expert_columns))
        self.threads = team.threads
        self._team = team
        self.library = library
        self._scratch = scratch
        self._linear = GgmlLinear(library, activations, matmul, tiled, scratch, bounds)
        self._tiled = tiled
        self._experts = GgmlExperts(library, team, activations, matmul, tiled, scratch, bounds)
        self._rows = GgmlRows(library, team, scratch, bounds)
        self._attention = GgmlAttention(library, team, scratch, bounds)
        if bounds.latent is not None:
            # More loops to compile or load, which other models need not wait for
            from infer.kernels.ggml_latent import GgmlLatent  # noqa: PLC0415

            self._latent = GgmlLatent(library, team, matmul, scratch, bounds, bounds.latent)

    def rouse(self) -> None:
        """A call comes in a moment: let the threads be awake for it. It may still not come."""
        self._team.rouse()

    def group(self, matrices: Sequence[QuantMatrix]) -> GgmlGroup:
        return self._linear.group(matrices)

    def linear(
        self,
        x: Tensor,
        group: GgmlGroup,
        exact: bool = False,
        out: Sequence[Tensor] | None = None,
    ) -> Sequence[Tensor]:
        return self._linear(x, group, exact, out)

    def experts(self, x: Tensor, batch: ExpertBatch, out: Tensor, exact: bool = False) -> Tensor:
        self._experts(x, batch, out, exact)
        return out

    def swiglu(
        self, x: Tensor, gate: QuantMatrix, up: QuantMatrix, down: QuantMatrix, exact: bool = False
    ) -> Tensor:
        tokens = len(x)
        if not exact and self._tiled.pays((gate.type_id, up.type_id, down.type_id), tokens):
            sums = torch.empty((tokens, down.rows))
            self._tiled.swiglu(x, gate, up, down, sums)
            return sums
        batch = ExpertBatch(
            ExpertFormat(gate.type_id, up.type_id, down.type_id, gate.columns, gate.rows),
            self._experts.every_pair[:tokens],
            np.array((0, tokens), np.int32),
            *(np.array((matrix.address,), np.int64) for matrix in (gate, up, down)),
        )
        out = torch.empty((tokens, 1, down.rows))
        self._experts(x, batch, out, exact)
        return out.view(tokens, down.rows)

    def embed(self, matrix: QuantMatrix, ids: Tensor) -> Tensor:
        return self._rows.embed(matrix, ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        return self._rows.rms_norm(x, weight, eps, out)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, start: int) -> None:
        self._rows.rope(x, cos, sin, start)

    def rope_pairs(self, x: Tensor, cos: Tensor, sin: Tensor, start: int, first: int = 0) -> None:
        self._rows.rope_pairs(x, cos, sin, start, first)

    def attention(
        self, q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float
    ) -> Tensor:
        return self._attention(q, keys, values, start, scale)

    def heads(self, matrices: Sequence[QuantMatrix]) -> GgmlHeadMatrices:
        return self._latent.heads.group(matrices)

    def per_head(self, x: Tensor, matrices: GgmlHeadMatrices, exact: bool = False) -> Tensor:
        return self._latent.heads(x, matrices, exact)

    def latent_attention(
        self,
        q: Tensor,
        latent: Tensor,
        value_width: int,
        start: int,
        scale: float,
        selected: Tensor | None = None,
    ) -> Tensor:
        return self._latent.attention(q, latent, value_width, start, scale, selected)

    def select(self, q: Tensor, weights: Tensor, keys: Tensor, start: int, top_k: int) -> Tensor:
        return self._latent.select(q, weights, keys, start, top_k)

    def add(self, x: Tensor, added: Tensor) -> None:
        """x [n, width] += added."""
        self._rows.add(x, added)

    @contextmanager
    def recorded(self) -> Iterator[Recorder]:
        """Inside, calls compute nothing: the recorder makes a `Program` of them."""
        recorder = Recorder(self._team.at, self.library.activation_format(TensorType.F16))
        run, self._team.run = self._team.run, recorder.note
        try:
            with recorder:
                yield recorder
        finally:
            self._team.run = run

    def route_sigmoid(
        self, logits: Tensor, bias: Tensor | None, top_k: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        return self._rows.route_sigmoid(logits, bias, top_k, scale)

    def weighted_sum(self, rows: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        return self._rows.weighted_sum(rows, weights, shared)
