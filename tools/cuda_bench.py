"""What the CUDA bench works with: random matrices, timing, and the lines of the table."""

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from gguf_blocks import sound_blocks
from torch import Tensor

from infer.kernels import reference
from infer.kernels.cuda.formats import is_float
from infer.kernels.cuda.kernels import CudaKernels
from infer.kernels.interface import ExpertFormat
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.scratch import KernelBounds
from shared.quants import GEOMETRY, TensorType, row_bytes

TOP_K = 8
BOUNDS = KernelBounds(
    tokens=512,
    columns=16384,
    expert_columns=2048,
    pairs=512 * TOP_K,
    experts=256,
    heads=64,
    head_dim=128,
    context=65536,
)
WORKING_SET_BYTES = 260e6
Result = dict[str, object]


class Bench:
    def __init__(self) -> None:
        self.kernels = CudaKernels(BOUNDS)
        self.results: list[Result] = []
        self.copy_rate = self._copy_rate()
        self._blocks: dict[str, Tensor] = {}

    def matrix(self, name: str, rows: int, columns: int) -> QuantMatrix:
        """Random blocks in random order, so no two matrices are alike."""
        kind = TensorType[name]
        if name not in self._blocks:
            self._blocks[name] = torch.from_numpy(sound_blocks(kind)).cuda()
        blocks = self._blocks[name]
        count = rows * columns // GEOMETRY[kind].block_weights
        data = blocks[torch.randint(len(blocks), (count,), device="cuda")]
        return QuantMatrix(kind, rows, columns, data.data_ptr(), data)

    def report(
        self, what: str, error: float | None, limit: float, us: float, **more: object
    ) -> None:
        """One line, and an entry of the results; a result beyond its limit ends the run."""
        line = {"what": what, "us": round(us, 2), **more}
        if error is not None:
            line["error"] = f"{error:.1e}"
        self.results.append(line)
        shown = "  ".join(f"{key} {value}" for key, value in line.items() if key != "what")
        print(f"{what:42} {shown}", flush=True)
        if error is not None and not error < limit:
            sys.exit(f"{what}: the error {error} is not below {limit}")

    def rates(self, us: float, weights: float, size_bytes: float) -> dict[str, object]:
        rate = size_bytes / us * 1e6
        return {
            "Gweights/s": round(weights / us / 1e3),
            "GB/s": round(rate / 1e9),
            "share": f"{rate / self.copy_rate:.0%}",
        }

    def _copy_rate(self) -> float:
        source = torch.randn(2**29, device="cuda")
        target = torch.empty_like(source)
        times = []
        for _ in range(8):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        rate = 2 * source.nbytes / float(np.median(times[1:]))
        print(f"copy {rate / 1e9:.0f} GB/s on {torch.cuda.get_device_name()}")
        return rate


def timed(work: Callable[[], object], calls: int, replays: int = 7) -> float:
    """Microseconds for one of `calls` calls that `work` makes: the median replay of a graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(np.median(times)) * 1e3 / calls


def dense(matrix: QuantMatrix) -> Tensor:
    """float64 on the device, dequantised by gguf on the CPU."""
    data = matrix.keepalive.cpu().numpy()
    return (
        reference.dequantize(QuantMatrix.over(matrix.type_id, matrix.columns, data)).cuda().double()
    )


def relative_error(result: Tensor, expected: Tensor) -> float:
    return ((result.double() - expected).norm() / expected.norm()).item()


def limit(name: str, exact: bool = False) -> float:
    return 1e-5 if exact or is_float(TensorType[name]) else 0.01


def wall(work: Callable[[], object], repeats: int = 5) -> float:
    """Microseconds of a call that a graph cannot hold, host included."""
    work()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return float(np.median(times)) * 1e6


class ExpertSets:
    """Enough experts of one format that a pass over them exceeds the caches."""

    def __init__(self, bench: Bench, names: tuple[str, str, str], d_model: int, d_ff: int) -> None:
        kinds = [TensorType[name] for name in names]
        self.format = ExpertFormat(*map(int, kinds), d_model, d_ff)
        shapes = ((d_ff, d_model), (d_ff, d_model), (d_model, d_ff))
        self.part_bytes = [
            rows * row_bytes(kind, columns)
            for kind, (rows, columns) in zip(kinds, shapes, strict=True)
        ]
        count = max(16, int(WORKING_SET_BYTES / sum(self.part_bytes)) + TOP_K)
        self.sets = count // TOP_K
        self.parts = [
            [bench.matrix(name, *shape) for _ in range(self.sets * TOP_K)]
            for name, shape in zip(names, shapes, strict=True)
        ]
        rows = [[matrix.address for matrix in part] for part in self.parts]
        table = torch.tensor(rows, dtype=torch.int64, device="cuda")
        self.addresses = list(table.view(3, self.sets, TOP_K).transpose(0, 1).contiguous())

    def expected(self, x: Tensor, expert: int) -> Tensor:
        return reference.swiglu(x.double(), *(dense(part[expert]) for part in self.parts))
