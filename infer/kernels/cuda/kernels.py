"""`Kernels` for CUDA tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.kernels.cuda.attention import Attention
from infer.kernels.cuda.dense import Dense
from infer.kernels.cuda.device import Device
from infer.kernels.cuda.experts import Experts
from infer.kernels.cuda.heads import Heads
from infer.kernels.cuda.inputs import InputRows
from infer.kernels.cuda.linear import CudaGroup, Linear
from infer.kernels.cuda.rows import Rows
from infer.kernels.interface import ExpertBatch, ExpertFormat
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.scratch import KernelBounds


class CudaKernels:
    """Methods are described in `interface.Kernels`; tensors and addresses are on the device.

    Addresses of matrices are multiples of 4, those of MXFP4 are free. The default arithmetic
    quantises activations to 8 bit in blocks of 32, except beside F32, F16 and BF16 weights; `exact`
    computes in float32. In both, a row has the same bits whatever else is in a call, with two
    exceptions of the default arithmetic for many tokens, which use bfloat16 on tensor cores and
    torch's order: `linear` from DENSE_TOKENS tokens on and experts from DENSE_PAIRS pairs an expert
    on; and `attention` from FLASH_TOKENS tokens on over a cache of 16-bit numbers.

    Work is queued on torch's current stream and never waited for. All scratch memory is reserved
    here; a call allocates its result at most. Calls with fewer tokens than the numbers above can be
    captured in a graph once each has run, except `experts`, whose lists come from the host:
    `experts_at` is there for that.
    """

    def __init__(self, bounds: KernelBounds, device: torch.device | str = "cuda") -> None:
        """For calls within `bounds`. ConfigError where this machine's GPU cannot be used."""
        self._gpu = Device(device)
        self._inputs = InputRows(
            self._gpu,
            [(bounds.tokens, bounds.columns)],
        )
        self._dense = Dense(self._gpu)
        self._linear = Linear(self._gpu, self._inputs, self._dense, bounds)
        self._experts = Experts(self._gpu, self._inputs, self._dense, bounds)
        self._rows = Rows(self._gpu)
        self._heads = Heads(self._gpu)
        self._attention = Attention(self._gpu, bounds)

    @property
    def device(self) -> torch.device:
        return self._gpu.device

    def group(self, matrices: Sequence[QuantMatrix]) -> CudaGroup:
        return self._linear.group(matrices)

    def linear(
        self,
        x: Tensor,
        group: CudaGroup,
        exact: bool = False,
        out: Sequence[Tensor] | None = None,
        quantised: bool = False,
    ) -> Sequence[Tensor]:
        """`quantised` saves a launch: the product before took the same x and made its 8-bit copy.

        That product was of fewer tokens than DENSE_TOKENS, not `exact`, and not beside float
        weights alone; products with float weights in between do no harm.
        """
        return self._linear(x, group, exact, out, quantised)

    def experts(self, x: Tensor, batch: ExpertBatch, out: Tensor, exact: bool = False) -> Tensor:
        self._experts(x, batch, out, exact)
        return out

    def experts_at(
        self,
        x: Tensor,
        shape: ExpertFormat,
        addresses: Tensor,
        out: Tensor,
        exact: bool = False,
        quantised: bool = False,
    ) -> Tensor:
        """As `experts`, for every pair, each with its own addresses in device memory.

        addresses int64 [3, n * top_k]: gate, up and down of pair token * top_k + rank, read when
        the work runs. A pair whose addresses are 0 is left out, and its row of `out` [n, top_k,
        d_model] stays as it is: run once for what is there, again for what came later.
        `quantised` as in `linear`.
        """
        self._experts.at_addresses(x, shape, addresses, out, exact, quantised)
        return out

    def swiglu(
        self,
        x: Tensor,
        gate: QuantMatrix,
        up: QuantMatrix,
        down: QuantMatrix,
        exact: bool = False,
        quantised: bool = False,
    ) -> Tensor:
        """`quantised` as in `linear`."""
        return self._experts.resident(x, gate, up, down, exact, quantised)

    def embed(self, matrix: QuantMatrix, ids: Tensor) -> Tensor:
        return self._dense.embed(matrix, ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        return self._rows.rms_norm(x, weight, eps, out)

    def prepare_heads(
        self,
        projections: tuple[Tensor, Tensor, Tensor],
        norms: tuple[Tensor, Tensor],
        eps: float,
        tables: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        start: int | Tensor,
    ) -> None:
        """In one launch: norm and rotate q (in place) and k, store k and v in the cache.

        projections: q [n, heads, head_dim], k, v [n, kv_heads, head_dim]; norms: their weights for
        q and k [head_dim]; tables: cos, sin as in `rope`; cache: keys, values [context, kv_heads,
        head_dim], float32, float16 or bfloat16; `start` as in `rope`. The bits are those of
        `rms_norm`, `rope` and a copy.
        """
        self._heads(projections, norms, eps, tables, cache, start)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, start: int | Tensor) -> None:
        """`start` may be an int32 tensor [1] on the device, read when the work runs."""
        self._rows.rope(x, cos, sin, start)

    def attention(
        self, q: Tensor, keys: Tensor, values: Tensor, start: int | Tensor, scale: float
    ) -> Tensor:
        """Caches are float32, float16 or bfloat16; `start` may be an int32 tensor [1] on the
        device, read when the work runs, for up to FLASH_TOKENS - 1 tokens."""
        return self._attention(q, keys, values, start, scale)

    def route_sigmoid(
        self, logits: Tensor, bias: Tensor | None, top_k: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        return self._rows.route_sigmoid(logits, bias, top_k, scale)

    def weighted_sum(self, rows: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        return self._rows.weighted_sum(rows, weights, shared)
