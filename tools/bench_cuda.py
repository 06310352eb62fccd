"""Check and time the CUDA kernels at the shapes of Hy3 and GLM-5.2.

    python tools/bench_cuda.py [--out results.json] [--only products,experts,...]

Weights are random valid blocks. Every timed product is first compared with float64 on gguf's
dequantised weights. Times are medians of graph replays; each replay goes through more distinct
weights than four times the L2 holds, so bytes come from device memory. Bandwidth is compared with a
large device-to-device copy, counting bytes read and written.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from cuda_bench import (
    TOP_K,
    WORKING_SET_BYTES,
    Bench,
    ExpertSets,
    dense,
    limit,
    relative_error,
    timed,
    wall,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from infer.kernels import reference
from infer.kernels.cuda import experts as cuda_experts
from infer.kernels.cuda import linear as cuda_linear
from infer.kernels.cuda.formats import FORMATS
from infer.kernels.interface import ExpertBatch
from shared.quants import TensorType, row_bytes

EXPERT_FORMATS = (
    ("IQ2_XXS", "IQ2_XXS", "Q2_K"),
    ("IQ2_XXS", "IQ2_XXS", "IQ2_XXS"),
    ("Q2_K", "Q2_K", "Q2_K"),
    ("IQ3_XXS", "IQ3_XXS", "IQ3_XXS"),
    ("Q4_K", "Q4_K", "Q4_K"),
    ("Q4_K", "Q4_K", "Q6_K"),
    ("Q8_0", "Q8_0", "Q8_0"),
)
MODELS = {"Hy3": (4096, 1536), "GLM-5.2": (6144, 2048)}


def bench_products(bench: Bench) -> None:
    """Every type at the experts' gate: eight matrices 1536 x 4096 in one launch."""
    for name in FORMATS:
        _products(bench, name, 1536, 4096, 8, (1,))
    for shape in (("Q8_0", 8192, 4096), ("Q4_K", 8192, 4096), ("Q6_K", 8192, 4096)):
        _products(bench, *shape, 1, (1, 2, 4, 8))
    _products(bench, "F32", 192, 4096, 1, (1,))
    _products(bench, "Q6_K", 120832, 4096, 1, (1,))


def _products(
    bench: Bench, name: str, rows: int, columns: int, members: int, counts: tuple[int, ...]
) -> None:
    size_bytes = members * rows * row_bytes(TensorType[name], columns)
    sets = max(2, min(200, int(WORKING_SET_BYTES / size_bytes) + 1))
    matrices = [[bench.matrix(name, rows, columns) for _ in range(members)] for _ in range(sets)]
    groups = [bench.kernels.group(each) for each in matrices]
    expected = dense(matrices[-1][-1]) if rows < 20000 else None
    for count in counts:
        x = torch.randn(count, columns, device="cuda")
        out = [torch.empty(count, rows, device="cuda") for _ in range(members)]

        def work(x: Tensor = x, out: list[Tensor] = out) -> None:
            for group in groups:
                bench.kernels.linear(x, group, out=out)

        us = timed(work, sets)
        error = None if expected is None else relative_error(out[-1], x.double() @ expected.T)
        rates = bench.rates(us, members * rows * columns, size_bytes)
        what = f"{name} {members} x {rows} x {columns}, n={count}"
        bench.report(what, error, limit(name), us, **rates)
    if counts == (1,) and members == 8:
        exact = bench.kernels.linear(x, groups[-1], exact=True)[-1]
        error = relative_error(exact, x.double() @ expected.T)
        assert error < limit(name, exact=True), f"{name} exact: {error}"


def bench_experts(bench: Bench) -> None:
    """One token's eight experts at addresses in device memory, whole and in halves."""
    for model, (d_model, d_ff) in MODELS.items():
        for names in EXPERT_FORMATS:
            _experts(bench, model, names, d_model, d_ff)


def _experts(
    bench: Bench, model: str, names: tuple[str, str, str], d_model: int, d_ff: int
) -> None:
    experts = ExpertSets(bench, names, d_model, d_ff)
    x = torch.randn(1, d_model, device="cuda")
    out = torch.empty(1, TOP_K, d_model, device="cuda")
    gate, up, down = experts.part_bytes
    weights = TOP_K * d_model * d_ff

    def run(addresses: list[Tensor]) -> float:
        def work() -> None:
            for each in addresses:
                bench.kernels.experts_at(x, experts.format, each, out)

        return timed(work, len(addresses))

    without_down, without_gate = (
        [each.clone() for each in experts.addresses],
        [each.clone() for each in experts.addresses],
    )
    for each in without_down:
        each[2] = 0
    for each in without_gate:
        each[:2] = 0
    title = f"{model} {'/'.join(names)}"
    us = run(without_down)
    bench.report(
        f"{title} gate+up", None, 0, us, **bench.rates(us, 2 * weights, TOP_K * (gate + up))
    )
    us = run(without_gate)
    bench.report(f"{title} down", None, 0, us, **bench.rates(us, weights, TOP_K * down))
    us = run(experts.addresses)
    last = len(experts.addresses) * TOP_K - 1
    error = relative_error(out[0, -1], experts.expected(x, last)[0])
    rates = bench.rates(us, 3 * weights, TOP_K * (gate + up + down))
    bench.report(f"{title} all", error, 0.03, us, **rates)


def _routed(count: int, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """(pairs sorted by expert, starts) of a uniform routing of `count` tokens."""
    rng = np.random.default_rng(1)
    choice = np.stack([rng.permutation(experts)[:TOP_K] for _ in range(count)]).reshape(-1)
    pairs = np.argsort(choice, kind="stable").astype(np.int32)
    starts = np.searchsorted(choice[pairs], np.arange(experts + 1)).astype(np.int32)
    return pairs, starts


def bench_prefill(bench: Bench) -> None:
    """Experts with many tokens: decoded for every 8 pairs, for every 32, or dequantised."""
    d_model, d_ff = MODELS["Hy3"]
    for names in (("IQ2_XXS", "IQ2_XXS", "Q2_K"), ("Q4_K", "Q4_K", "Q4_K")):
        sets = ExpertSets(bench, names, d_model, d_ff)
        addresses = np.stack([[m.address for m in part] for part in sets.parts])
        experts = min(48, addresses.shape[1])
        for count in (16, 64, 128, 256, 512):
            pairs, starts = _routed(count, experts)
            batch = ExpertBatch(sets.format, pairs, starts, *addresses[:, :experts])
            x = torch.randn(count, d_model, device="cuda")
            out = torch.empty(count, TOP_K, d_model, device="cuda")
            paths = {"tiles": (10**9, 10**9), "grouped": (0, 10**9), "dense": (0, 0)}
            for path, thresholds in paths.items():
                cuda_experts.GROUPED_PAIRS, cuda_experts.DENSE_PAIRS = thresholds
                us = wall(lambda x=x, b=batch, o=out: bench.kernels.experts(x, b, o))
                expert = int(np.searchsorted(starts, 0, "right")) - 1
                token, rank = divmod(int(pairs[0]), TOP_K)
                expected = sets.expected(x[token : token + 1], expert)[0]
                error = relative_error(out[token, rank], expected)
                what = f"{'/'.join(names)} {path}, {count * TOP_K / experts:.0f} pairs an expert"
                bench.report(what, error, 0.03, us, **{"us an expert": round(us / experts, 1)})


def bench_tokens(bench: Bench) -> None:
    """A resident matrix with many tokens, both ways."""
    matrix = bench.matrix("Q8_0", 8192, 4096)
    group, weights = bench.kernels.group([matrix]), dense(matrix)
    for count in (16, 32, 64, 128, 256, 512):
        x = torch.randn(count, 4096, device="cuda")
        out = [torch.empty(count, 8192, device="cuda")]
        for path, threshold in (("tiles", 10**9), ("dense", 0)):
            cuda_linear.DENSE_TOKENS = threshold
            us = wall(lambda x=x, o=out: bench.kernels.linear(x, group, out=o))
            error = relative_error(out[0], x.double() @ weights.T)
            bench.report(f"Q8_0 8192 x 4096 {path}, n={count}", error, 0.01, us)


def bench_attention(bench: Bench) -> None:
    heads, kv_heads, head_dim = 64, 8, 128
    scale = head_dim**-0.5
    for context in (1024, 8192, 65536):
        size_bytes = 2 * 2 * context * kv_heads * head_dim
        caches = [
            torch.randn(2, context, kv_heads, head_dim, device="cuda").to(torch.bfloat16)
            for _ in range(max(2, int(WORKING_SET_BYTES / size_bytes) + 1))
        ]
        q = torch.randn(1, heads, head_dim, device="cuda")

        def own(caches: list[Tensor] = caches, q: Tensor = q, context: int = context) -> Tensor:
            for keys, values in caches:
                result = bench.kernels.attention(q, keys, values, context - 1, scale)
            return result

        def theirs(caches: list[Tensor] = caches, q: Tensor = q) -> Tensor:
            query = q.to(torch.bfloat16).transpose(0, 1)[None]
            for cache in caches:
                keys, values = cache.transpose(1, 2)[:, None]
                result = scaled_dot_product_attention(
                    query, keys, values, scale=scale, enable_gqa=True
                )
            return result

        keys, values = caches[-1].double()
        expected = reference.attention(q.double(), keys, values, context - 1, scale)
        for who, work in (("own", own), ("torch", theirs)):
            us = timed(work, len(caches))
            error = relative_error(work().reshape(1, heads, head_dim), expected)
            rates = bench.rates(us, 0, size_bytes)
            rates.pop("Gweights/s")
            bench.report(f"attention {who}, context {context}", error, 0.01, us, **rates)
    for start in (0, 7680):
        q = torch.randn(512, heads, head_dim, device="cuda")
        cache = torch.randn(2, 8192, kv_heads, head_dim, device="cuda").to(torch.bfloat16)
        us = wall(lambda q=q, c=cache, s=start: bench.kernels.attention(q, *c, s, scale))
        bench.report(f"attention, 512 tokens at {start}", None, 0, us)


def bench_rows(bench: Bench) -> None:
    """The small kernels: a graph of 50 each, so the time between kernels is in."""
    kernels = bench.kernels
    x, weight = torch.randn(1, 4096, device="cuda"), torch.randn(4096, device="cuda")
    q, norm = torch.randn(1, 64, 128, device="cuda"), torch.randn(128, device="cuda")
    k = torch.randn(1, 8, 128, device="cuda")
    cache = torch.zeros(16, 8, 128, dtype=torch.bfloat16, device="cuda")
    tables = torch.randn(2, 1024, 64, device="cuda")
    logits, bias = torch.randn(1, 192, device="cuda"), torch.randn(192, device="cuda")
    rows, shares = torch.randn(1, 8, 4096, device="cuda"), torch.rand(1, 8, device="cuda")
    parts = {
        "rms_norm 4096": lambda: kernels.rms_norm(x, weight, 1e-5, out=x),
        "norms, rope, cache, 64 + 8 heads": lambda: kernels.prepare_heads(
            (q, k, k), (norm, norm), 1e-5, tuple(tables), (cache, cache), 7
        ),
        "rms_norm 64 x 128": lambda: kernels.rms_norm(q, norm, 1e-5, out=q),
        "rope 64 x 128": lambda: kernels.rope(q, *tables, 7),
        "route 192, top 8": lambda: kernels.route_sigmoid(logits, bias, TOP_K, 1.0),
        "weighted sum 8 x 4096": lambda: kernels.weighted_sum(rows, shares, x),
    }
    for what, work in parts.items():
        us = timed(lambda work=work: [work() for _ in range(50)], 50)
        begin = time.perf_counter()
        for _ in range(1000):
            work()
        host_us = (time.perf_counter() - begin) * 1e3
        torch.cuda.synchronize()
        bench.report(what, None, 0, us, **{"host us a launch": round(host_us, 1)})


PARTS = {
    "products": bench_products,
    "experts": bench_experts,
    "prefill": bench_prefill,
    "tokens": bench_tokens,
    "attention": bench_attention,
    "rows": bench_rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    arguments = parser.parse_args()
    bench = Bench()
    with torch.inference_mode():
        for name in arguments.only.split(","):
            PARTS[name](bench)
    if arguments.out:
        copy = {"copy_gb_s": bench.copy_rate / 1e9, "results": bench.results}
        arguments.out.write_text(json.dumps(copy, indent=1))


if __name__ == "__main__":
    main()
