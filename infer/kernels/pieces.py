"""How much is computed in one call of a compiled loop.

Python hears of Ctrl-C only between two calls, and scratch memory is reserved for one of them. So a
long prompt goes through a matrix in pieces, whose bits are those of the whole.
"""

from collections.abc import Iterator

import numpy as np

from infer.kernels.interface import ExpertBatch

# A third of a second on two slow processors; beside it the costs of a call do not count.
PIECE_PRODUCTS = 3 * 10**9
# Inputs or hidden values that scratch memory is reserved for, where one row does not have more.
PIECE_VALUES = 1 << 22


def piece_values(row_values: int, rows: int) -> int:
    """Room for `rows` rows at the most, for one at the least."""
    return min(row_values * rows, max(row_values, PIECE_VALUES))


def piece_rows(weights: int, row_values: int, values: int) -> int:
    """Rows of `row_values` that fit `values` and may be multiplied by so many weights at once."""
    return max(1, min(PIECE_PRODUCTS // weights, values // row_values))


def split_batch(batch: ExpertBatch, pair_count: int) -> Iterator[ExpertBatch]:
    """Batches of at most `pair_count` pairs, in order."""
    total_count = len(batch.pairs)
    if total_count <= pair_count:
        yield batch
        return
    for first in range(0, total_count, pair_count):
        last = min(first + pair_count, total_count)
        begin = np.searchsorted(batch.group_start, first, "right") - 1
        end = np.searchsorted(batch.group_start, last, "left")
        groups = slice(begin, end)
        starts = np.clip(batch.group_start[begin : end + 1], first, last) - first
        yield ExpertBatch(
            batch.format,
            batch.pairs[first:last],
            starts.astype(np.int32),
            *(addresses[groups] for addresses in (batch.gate, batch.up, batch.down)),
        )


def part_by_count(batch: ExpertBatch, least_count: int) -> tuple[ExpertBatch, ExpertBatch]:
    """The experts with so many pairs or more, and the others, each with their pairs."""
    counts = np.diff(batch.group_start)
    many = counts >= least_count
    return _groups(batch, counts, many), _groups(batch, counts, ~many)


def _groups(batch: ExpertBatch, counts: np.ndarray, wanted: np.ndarray) -> ExpertBatch:
    return ExpertBatch(
        batch.format,
        batch.pairs[np.repeat(wanted, counts)],
        np.concatenate(([0], np.cumsum(counts[wanted]))).astype(np.int32),
        *(addresses[wanted] for addresses in (batch.gate, batch.up, batch.down)),
    )
