"""How fast the CPU kernels are: weights by type, and what it costs to start a parallel job.

    python tools/bench_cpu_kernels.py [--threads N] [--types IQ2_XXS,Q4_K] [--experts 8] ...

For each type, in Gweights/s: `dot`, one matrix through a loop of vec_dot in one thread; `experts`,
the decode step of one token's experts with all threads, quantising activations included; the same
for a batch of tokens; `exact`, the decode step on dequantised weights. Times are the best of
several, with weights that do not fit in a core's own cache.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from infer.kernels.ggml_cpu import GgmlKernels
from infer.kernels.interface import ExpertBatch, ExpertFormat
from infer.kernels.jobs import job_structure, prepared_job
from infer.kernels.numba_cache import worker
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.scratch import KernelBounds
from infer.kernels.thread_team import ThreadTeam, run
from shared.quants import GEOMETRY, TensorType, row_bytes

_ROUNDS = 7
_EmptyJob = job_structure("EmptyJob")


@worker
def _nothing(job_at):
    pass


def main() -> None:
    options = _parser().parse_args()
    torch.set_num_threads(1)
    _launches(options.threads)
    print(f"{'Gweights/s':12}{'dot':>8}{'experts':>9}{'batch':>8}{'exact':>8}")
    for name in options.types.split(","):
        _weights(TensorType[name], options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=None, help="default: every processor")
    parser.add_argument("--types", default="IQ2_XXS,Q2_K,Q4_K,Q6_K,Q8_0")
    parser.add_argument("--experts", type=int, default=8, help="experts of one token")
    parser.add_argument("--d-model", type=int, default=4096)
    parser.add_argument("--d-ff", type=int, default=1536)
    parser.add_argument("--tokens", type=int, default=16, help="tokens of the batch")
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


def _weights(kind: TensorType, options: argparse.Namespace) -> None:
    experts, d_model, d_ff, tokens = options.experts, options.d_model, options.d_ff, options.tokens
    bounds = KernelBounds(tokens, d_model, d_ff, tokens * experts, experts, 1, 1, 1)
    team, alone = GgmlKernels(bounds, options.threads), GgmlKernels(bounds, 1)
    gate, up = ([_matrix(kind, d_ff, d_model) for _ in range(experts)] for _ in range(2))
    down = [_matrix(kind, d_model, d_ff) for _ in range(experts)]
    weights = 3 * experts * d_model * d_ff
    groups = [alone.group([matrix]) for matrix in gate]
    x = torch.randn(tokens, d_model)

    def dots() -> None:
        for group in groups:
            alone.linear(x[:1], group)

    def step(count: int, exact: bool) -> Callable[[], None]:
        batch = _batch(kind, d_model, d_ff, count, gate, up, down)
        out = torch.empty(count, experts, d_model)
        return lambda: team.experts(x[:count], batch, out, exact)

    rates = (
        experts * d_model * d_ff / _best(dots),
        weights / _best(step(1, False)),
        weights * tokens / _best(step(tokens, False)),
        weights / _best(step(1, True)),
    )
    dot, decode, batch, exact = (rate / 1e9 for rate in rates)
    print(f"{kind.name:12}{dot:8.2f}{decode:9.2f}{batch:8.2f}{exact:8.2f}")


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
