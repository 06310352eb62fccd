"""`Kernels` for CUDA tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.kernels.cuda.attention import Attention
from infer.kernels.cuda.dense import Dense
from infer.kernels.cuda.device import Device
from infer.kernels.cuda.experts import Experts
from infer.kernels.cuda.head_products import CudaHeadMatrices, HeadProducts
from infer.kernels.cuda.heads import Heads
from infer.kernels.cuda.inputs import NO_CODES, InputRows
from infer.kernels.cuda.latent import latent_attention, rope_pairs, select
from infer.kernels.cuda.linear import CudaGroup, Linear
from infer.kernels.cuda.rows import Mailbox, Rows, Sum
from infer.kernels.interface import ExpertBatch, ExpertFormat
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.scratch import KernelBounds


class CudaKernels:
    """Methods are described in `interface.Kernels`; tensors and addresses are on the device.

    Addresses of matrices are multiples of 4, those of MXFP4 are free. The default arithmetic
    quantises activations to 8 bit in blocks of 32, except beside F32, F16 and BF16 weights; `exact`
    computes in float32. In both, a row has the same bits whatever else is in a call, but sums in
    another order for many tokens: `linear` with float weights alone from DENSE_FLOAT_TOKENS on. So
    has the default arithmetic, for `experts` from GROUPED_PAIRS pairs an expert on; with bfloat16
    on tensor cores and torch's order for `linear` and `swiglu` from DENSE_TOKENS tokens on, experts
    from DENSE_PAIRS pairs on and `attention` from FLASH_TOKENS tokens on over a cache of 16 bits.

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
        self._experts = Experts(self._gpu, self._inputs, self._linear, self._dense, bounds)
        self._rows = Rows(self._gpu)
        self._heads = Heads(self._gpu)
        self._head_products = HeadProducts(self._gpu, self._dense, bounds)
        self._attention = Attention(self._gpu, self._inputs, bounds)

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
        out: Tensor | None = None,
    ) -> Tensor:
        """`quantised` as in `linear`."""
        return self._experts.resident(x, (gate, up, down), exact, quantised, out)

    def embed(self, matrix: QuantMatrix, ids: Tensor, out: Tensor | None = None) -> Tensor:
        return self._dense.embed(matrix, ids, out)

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
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        start: int | Tensor,
        scale: float,
        quantise: bool = False,
    ) -> Tensor:
        """Caches are float32, float16 or bfloat16; `start` may be an int32 tensor [1] on the
        device, read when the work runs, for up to FLASH_TOKENS - 1 tokens. `quantise`: leave an
        8-bit copy of the result for a product that is told `quantised`; for as many tokens."""
        return self._attention(q, keys, values, start, scale, quantise)

    def rope_pairs(
        self, x: Tensor, cos: Tensor, sin: Tensor, start: int | Tensor, first: int = 0
    ) -> None:
        """`start`, here and in the next ones, may be an int32 tensor [1] for one token."""
        rope_pairs(x, cos, sin, start, first)

    def heads(self, matrices: Sequence[QuantMatrix]) -> CudaHeadMatrices:
        return self._head_products.group(matrices)

    def per_head(
        self,
        x: Tensor,
        matrices: CudaHeadMatrices,
        exact: bool = False,
    ) -> Tensor:
        return self._head_products(x, matrices, exact)

    def latent_attention(
        self,
        q: Tensor,
        latent: Tensor,
        value_width: int,
        start: int | Tensor,
        scale: float,
        selected: Tensor | None = None,
    ) -> Tensor:
        return latent_attention(q, latent, value_width, start, scale, selected)

    def select(
        self, q: Tensor, weights: Tensor, keys: Tensor, start: int | Tensor, top_k: int
    ) -> Tensor:
        return select(q, weights, keys, start, top_k)

    def route_sigmoid(
        self,
        logits: Tensor,
        bias: Tensor | None,
        top_k: int,
        scale: float,
        out: tuple[Tensor, Tensor] | None = None,
        mailbox: Mailbox | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`mailbox`: the host's memory that a single token's ids go to as well."""
        return self._rows.route_sigmoid(logits, bias, top_k, scale, out, mailbox)

    def add_norm(
        self,
        x: Tensor,
        added: Sum,
        weight: Tensor,
        eps: float,
        normed: Tensor,
        quantise: bool = False,
    ) -> None:
        """In one launch: x [n, columns] += added, normed = rms_norm(x), with the bits of both.

        `quantise`: leave an 8-bit copy of `normed` for products that are told `quantised`.
        """
        codes = self._inputs.target(*x.shape) if quantise else NO_CODES
        self._rows.add_norm(x, added, weight, eps, normed, codes)

    def take(self, pinned: Tensor, out: Tensor) -> None:
        """Copy int64 numbers from the host's pinned memory when the work runs, a launch each."""
        self._rows.take(pinned, out)

    def give(self, x: Tensor, pinned: Tensor) -> None:
        """Copy float32 numbers, an even count, to the host's pinned memory when the work runs.

        They are there when the host sees what a later `route_sigmoid` writes to a mailbox.
        """
        self._rows.give(x, pinned)

    def take_rows(self, sources: Tensor, out: Tensor) -> None:
        """Rows of `out` [..., columns] from the host's pinned memory, when the work runs.

        sources int64, one a row of `out`, in device memory: where the row lies, 0 to leave it.
        """
        self._rows.take_rows(sources, out)

    def weighted_sum(self, rows: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        return self._rows.weighted_sum(rows, weights, shared)
