"""How fast the CPU kernels are: a job's start, attention by context, experts by type.

    python tools/bench_cpu_kernels.py [--threads N] [--types IQ2_XXS,Q4_K] [--experts 8] ...

For each type, in Gweights/s: `dot`, rows through vec_dot with all threads and nothing else;
`experts`, the decode step of one token's experts as a whole, quantising activations included, and
its share of `dot`; the same for `--tokens` by vec_dot, and by tiles through torch; `exact`, the
decode step on dequantised weights. Weights of the decode step do not fit in a core's own cache.

Attention, in us with all threads, over a cache of float16: our loop, and torch's SDPA on the cache
converted to float32, as ours does tile by tile, and in float16.
All times are the best of several.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from infer.kernels.ggml_cpu import GgmlKernels
from infer.kernels.ggml_linear import MAX_GROUP_MATRICES
from infer.kernels.interface import ExpertBatch, ExpertFormat
from infer.kernels.jobs import job_structure, prepared_job
from infer.kernels.numba_cache import worker
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.scratch import KernelBounds
from infer.kernels.thread_team import ThreadTeam, run
from infer.kernels.tiled_matmul import TiledMatmul
from shared.quants import GEOMETRY, TensorType, row_bytes

_ROUNDS = 7
EXPERT_TYPES = (
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("MXFP4", "NVFP4", "F16", "BF16"),
)
CONTEXTS = (100, 1000, 8000)
_EmptyJob = job_structure("EmptyJob")


@worker
def _nothing(job_at):
    pass


def main() -> None:
    options = _parser().parse_args()
    torch.set_num_threads(1)
    if options.types == "all":
        options.types = ",".join(EXPERT_TYPES)
    _launches(options.threads)
    _attention(options.threads)
    heads = ("dot", "experts", "share", "batch", "tiles", "exact")
    print(f"{'Gweights/s':12}" + "".join(f"{head:>9}" for head in heads))
    for name in options.types.split(","):
        _weights(TensorType[name], options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=None, help="default: every processor")
    parser.add_argument("--types", default="IQ2_XXS,Q2_K,Q4_K,Q6_K,Q8_0", help="or: all")
    parser.add_argument("--experts", type=int, default=8, help="experts of one token")
    parser.add_argument("--d-model", type=int, default=4096)
    parser.add_argument("--d-ff", type=int, default=1536)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a batch")
    return parser


def _launches(threads: int | None) -> None:
    """Median time of a job without work, straight after another and after pauses."""
    team = ThreadTeam(threads)
    job = prepared_job(_EmptyJob, team.at)
    job.items = 2
    for pause_us in (0, 50, 5000):
        samples = []
        for _ in range(300 if pause_us < 1000 else 40):
            _pause(pause_us)
            begin = time.perf_counter()
            run(job.at, _nothing)
            samples.append(time.perf_counter() - begin)
        median_us = sorted(samples)[len(samples) // 2] * 1e6
        print(f"a job for {team.threads} threads after {pause_us} us: {median_us:.2f} us")
    team.close()


def _pause(pause_us: int) -> None:
    if pause_us >= 1000:
        time.sleep(pause_us / 1e6)
        return
    end = time.perf_counter() + pause_us / 1e6
    while time.perf_counter() < end:
        pass


def _attention(threads: int | None) -> None:
    """Hy3's heads: 64 queries and 8 keys of 128."""
    heads, kv_heads, width = 64, 8, 128
    context = max(CONTEXTS)
    kernels = GgmlKernels(KernelBounds(64, 256, 256, 1, 1, heads, width, context), threads)
    keys, values = (torch.randn(context, kv_heads, width).half() for _ in range(2))
    print(f"{'attention':12}{'ours':>9}{'float32':>9}{'float16':>9}")
    torch.set_num_threads(kernels.threads)
    for queries in (1, 64):
        q = torch.randn(queries, heads, width)
        for end in CONTEXTS:
            calls = [lambda q=q, end=end: kernels.attention(q, keys, values, end - len(q), 0.1)]
            calls += [
                lambda q=q, end=end, kind=kind: _sdpa(q, keys[:end], values[:end], kind)
                for kind in (torch.float32, torch.float16)
            ]
            cells = "".join(f"{1e6 * _best(call):9.0f}" for call in calls)
            print(f"{queries:3} at {end:<6}{cells}")
    torch.set_num_threads(1)


def _sdpa(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kind: torch.dtype
) -> torch.Tensor:
    """The last queries of a sequence; those that share a key lie below each other as its rows."""
    (count, heads, width), (end, kv_heads, _) = q.shape, keys.shape
    rows = q.view(count, kv_heads, -1, width).permute(1, 2, 0, 3).reshape(kv_heads, -1, width)
    mask = None
    if count > 1:
        mask = torch.ones(count, end, dtype=torch.bool).tril(end - count)
        mask = mask.repeat(heads // kv_heads, 1)
    k, v = (x.transpose(0, 1).to(kind)[None] for x in (keys, values))
    return scaled_dot_product_attention(rows.to(kind)[None], k, v, mask, scale=0.1)


def _weights(kind: TensorType, options: argparse.Namespace) -> None:
    experts, d_model, d_ff, tokens = options.experts, options.d_model, options.d_ff, options.tokens
    bounds = KernelBounds(tokens, d_model, d_ff, tokens * experts, experts, 1, 1, 1)
    kernels = GgmlKernels(bounds, options.threads, tiles=False)
    gate, up = ([_matrix(kind, d_ff, d_model) for _ in range(experts)] for _ in range(2))
    down = [_matrix(kind, d_model, d_ff) for _ in range(experts)]
    weights = 3 * experts * d_model * d_ff
    group = kernels.group([gate[0], up[0]] if experts == 1 else [*gate, *up][:MAX_GROUP_MATRICES])
    x = torch.randn(tokens, d_model)
    tiles = TiledMatmul(kernels.library, kernels.threads, enabled=True)
    out = torch.empty(tokens, experts, d_model)

    def step(count: int, exact: bool = False) -> Callable[[], None]:
        batch = _batch(kind, d_model, d_ff, count, gate, up, down)
        return lambda: kernels.experts(x[:count], batch, out[:count], exact)

    every = _batch(kind, d_model, d_ff, tokens, gate, up, down)
    dot = group.weights / _best(lambda: kernels.linear(x[:1], group))
    decode = weights / _best(step(1))
    rates = (
        weights * tokens / _best(step(tokens)),
        weights * tokens / _best(lambda: tiles.experts(x, every, out)),
        weights / _best(step(1, exact=True)),
    )
    cells = "".join(f"{rate / 1e9:9.2f}" for rate in rates)
    print(f"{kind.name:12}{dot / 1e9:9.2f}{decode / 1e9:9.2f}{decode / dot:9.2f}{cells}")


def _batch(
    kind: TensorType,
    d_model: int,
    d_ff: int,
    tokens: int,
    gate: list[QuantMatrix],
    up: list[QuantMatrix],
    down: list[QuantMatrix],
) -> ExpertBatch:
    """Every token with every expert."""
    experts = len(gate)
    pairs = np.arange(tokens * experts, dtype=np.int32).reshape(tokens, experts)
    return ExpertBatch(
        ExpertFormat(kind, kind, kind, d_model, d_ff),
        np.ascontiguousarray(pairs.T).reshape(-1),
        np.arange(experts + 1, dtype=np.int32) * tokens,
        *(np.array([m.address for m in part], np.int64) for part in (gate, up, down)),
    )


def _matrix(kind: TensorType, rows: int, columns: int) -> QuantMatrix:
    """Random bytes: the time of a dot product does not depend on the weights' values."""
    data = np.random.default_rng(rows).integers(
        0, 256, (rows, row_bytes(kind, columns)), dtype=np.uint8
    )
    # No block's scale is infinite or NaN: the highest exponent bit of each float16 is cleared.
    data.reshape(-1, GEOMETRY[kind].block_bytes)[...] &= 0xBF
    return QuantMatrix.over(kind, columns, data)


def _best(function: Callable[[], None]) -> float:
    """Seconds of the fastest of some rounds."""
    times = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


if __name__ == "__main__":
    main()
