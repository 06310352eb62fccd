"""Products of many tokens: weights are dequantised a tile at a time, and torch multiplies.

In bfloat16, and only where the processor multiplies that in hardware: there it is four to ten times
as fast as a vec_dot for each pair of rows (160 to 220 G products/s a core against 10 to 35), and
nearer to float64 too, since eight bits of mantissa lose less than an eight-bit integer that shares
its scale with 32 or 256 others. Float32 (45 to 50 G products/s) would win little, and so would
ggml's products of repacked rows (58 to 65, for a few types, behind a repacking in each call): other
processors stay with vec_dot.

A tile is dequantised once for all tokens, which pays from `least_tokens` on. A token's bits depend
on how many others are multiplied with it, but on neither the threads nor on what is resident.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from infer.kernels.ggml_library import GgmlLibrary, host_features
from infer.kernels.interface import ExpertBatch
from infer.kernels.numba_cache import kernel
from infer.kernels.numba_calls import call_convert
from infer.kernels.quant_matrix import QuantMatrix
from shared.quants import TensorType

# LLVM's names of instructions for products of bfloat16
_BF16_INSTRUCTIONS = ("avx512bf16", "amx-bf16")
_TILE_WEIGHTS = 1 << 19  # a megabyte: stays in a second-level cache
_TILE_ROWS = 16  # and multiples of it
# Inputs of one call: bounds the memory that they take, and the time until Ctrl-C is heard.
_PIECE_VALUES = 1 << 22
# Twice as many as make up for dequantising, at 1.5 to 3.5 Gweights/s a core; more for types that
# lose more by that, or are faster in vec_dot.
_LEAST_TOKENS = 20
_LEAST_TOKENS_BY_TYPE = {
    **dict.fromkeys(
        (
            *(TensorType.Q2_K, TensorType.Q3_K, TensorType.Q6_K, TensorType.Q5_0, TensorType.Q5_1),
            *(TensorType.MXFP4, TensorType.NVFP4, TensorType.IQ4_XS),
        ),
        40,
    ),
    TensorType.IQ4_NL: 96,
}
# Beside these vec_dot keeps more of the inputs than bfloat16 has.
_PRECISE_TYPES = frozenset({TensorType.F32, TensorType.F16})


@kernel("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def _dequantise(to_float, from_float, source, row_bytes, rows, columns, floats, tile):
    """Rows at `source` become bfloat16 at `tile`, by way of one row of floats."""
    for row in range(rows):
        call_convert(to_float, source + row * row_bytes, floats, columns)
        call_convert(from_float, floats, tile + row * columns * 2, columns)


def multiplies_bf16() -> bool:
    """Whether this processor does, in hardware and through torch."""
    features = host_features()
    fast = any(features.get(name, False) for name in _BF16_INSTRUCTIONS)
    return fast and torch.backends.mkldnn.is_available()


def least_tokens(type_ids: Sequence[int]) -> int:
    """From how many tokens on a product with matrices of these types is faster by tiles."""
    counts = [_LEAST_TOKENS_BY_TYPE.get(type_id, _LEAST_TOKENS) for type_id in type_ids]
    return sum(counts) // len(counts)


class TiledMatmul:
    """Runs in threads of its own, as torch's operations want Python's."""

    def __init__(self, library: GgmlLibrary, threads: int, enabled: bool | None = None) -> None:
        """enabled: by default where the processor is made for it."""
        self._library = library
        self._threads = threads
        self._enabled = multiplies_bf16() if enabled is None else enabled
        self._from_float = library.activation_format(TensorType.BF16).from_float
        self._memory = threading.local()
        self._pool: ThreadPoolExecutor | None = None

    def pays(self, type_ids: Sequence[int], tokens: int) -> bool:
        """Whether so many tokens are multiplied faster by this."""
        return (
            self._enabled
            and tokens >= _LEAST_TOKENS
            and not _PRECISE_TYPES.intersection(type_ids)
            and tokens >= least_tokens(type_ids)
        )

    def linear(self, x: Tensor, matrices: Sequence[QuantMatrix], out: Sequence[Tensor]) -> None:
        """x [n, columns]; out: for each matrix float32 [n, rows]."""
        for piece in _pieces(len(x), x.shape[1]):
            inputs = x[piece].bfloat16()

            def multiply(
                matrix: QuantMatrix, rows: slice, target: Tensor, inputs: Tensor = inputs
            ) -> None:
                target[:, rows] = torch.mm(inputs, self._tile(matrix, rows).t())

            self._run(
                partial(multiply, matrix, rows, target[piece])
                for matrix, target in zip(matrices, out, strict=True)
                for rows in _tiles(matrix)
            )

    def swiglu(
        self, x: Tensor, gate: QuantMatrix, up: QuantMatrix, down: QuantMatrix, out: Tensor
    ) -> None:
        """x [n, columns of gate], out float32 [n, rows of down]."""
        for piece in _pieces(len(x), max(gate.columns, gate.rows)):
            inputs = x[piece].bfloat16()
            hidden = torch.empty((len(inputs), gate.rows), dtype=torch.bfloat16)
            self._run(partial(self._hide, inputs, gate, up, hidden, r) for r in _tiles(gate))
            target = out[piece]
            self._run(partial(self._show, hidden, down, target, rows) for rows in _tiles(down))

    def experts(self, x: Tensor, batch: ExpertBatch, out: Tensor) -> None:
        """As `Kernels.experts`; several experts are computed at once, each in one thread."""
        rows = out.view(-1, out.shape[2])
        pairs = torch.from_numpy(batch.pairs.astype(np.int64))
        starts = batch.group_start.tolist()

        def compute(group: int) -> None:
            own = pairs[starts[group] : starts[group + 1]]
            matrices = _expert(batch, group)
            for piece in _pieces(len(own), max(x.shape[1], matrices[0].rows)):
                inputs = x[own[piece] // out.shape[1]].bfloat16()
                rows[own[piece]] = self._block(inputs, *matrices)

        self._run(partial(compute, group) for group in range(len(batch.gate)))

    def _block(
        self, inputs: Tensor, gate: QuantMatrix, up: QuantMatrix, down: QuantMatrix
    ) -> Tensor:
        hidden = torch.empty((len(inputs), gate.rows), dtype=torch.bfloat16)
        for rows in _tiles(gate):
            self._hide(inputs, gate, up, hidden, rows)
        out = torch.empty((len(inputs), down.rows))
        for rows in _tiles(down):
            self._show(hidden, down, out, rows)
        return out

    def _hide(
        self, inputs: Tensor, gate: QuantMatrix, up: QuantMatrix, hidden: Tensor, rows: slice
    ) -> None:
        gated = silu(torch.mm(inputs, self._tile(gate, rows).t()).float())
        hidden[:, rows] = gated * torch.mm(inputs, self._tile(up, rows).t())

    def _show(self, hidden: Tensor, down: QuantMatrix, out: Tensor, rows: slice) -> None:
        out[:, rows] = torch.mm(hidden, self._tile(down, rows).t())

    def _tile(self, matrix: QuantMatrix, rows: slice) -> Tensor:
        """bfloat16 [rows, columns], valid until this thread's next tile."""
        count, columns = rows.stop - rows.start, matrix.columns
        floats, tile = self._room(columns, count * columns)
        _dequantise(
            self._library.functions(matrix.type_id).to_float,
            self._from_float,
            matrix.address + rows.start * matrix.row_bytes,
            matrix.row_bytes,
            count,
            columns,
            floats.data_ptr(),
            tile.data_ptr(),
        )
        return tile[: count * columns].view(count, columns)

    def _room(self, columns: int, values: int) -> tuple[Tensor, Tensor]:
        """This thread's row of floats and its tile, which grow to what is needed."""
        memory = self._memory
        if not hasattr(memory, "tile") or len(memory.tile) < values or len(memory.floats) < columns:
            memory.floats = torch.empty(columns)
            memory.tile = torch.empty(max(values, _TILE_WEIGHTS), dtype=torch.bfloat16)
        return memory.floats, memory.tile

    def _run(self, tasks: Iterator[Callable[[], None]]) -> None:
        """All of them; after an exception, such as Ctrl-C's, none is begun any more."""
        if self._threads == 1:
            for task in tasks:
                task()
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "tiles")
        for _ in self._pool.map(_without_gradients, list(tasks)):
            pass


def _without_gradients(task: Callable[[], None]) -> None:
    with torch.inference_mode():  # of each thread's own
        task()


def _expert(batch: ExpertBatch, group: int) -> tuple[QuantMatrix, QuantMatrix, QuantMatrix]:
    form = batch.format
    return (
        QuantMatrix(form.gate_type, form.d_ff, form.d_model, int(batch.gate[group])),
        QuantMatrix(form.up_type, form.d_ff, form.d_model, int(batch.up[group])),
        QuantMatrix(form.down_type, form.d_model, form.d_ff, int(batch.down[group])),
    )


def _pieces(tokens: int, values: int) -> Iterator[slice]:
    """Tokens of `values` numbers each, in pieces that do not depend on what else is computed."""
    count = max(_LEAST_TOKENS, _PIECE_VALUES // values)
    for first in range(0, tokens, count):
        yield slice(first, min(first + count, tokens))


def _tiles(matrix: QuantMatrix) -> Iterator[slice]:
    """Rows of a matrix, a tile each."""
    rows = max(1, _TILE_WEIGHTS // matrix.columns // _TILE_ROWS) * _TILE_ROWS
    for first in range(0, matrix.rows, rows):
        yield slice(first, min(first + rows, matrix.rows))
