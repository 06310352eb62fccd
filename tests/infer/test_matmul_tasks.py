"""How a product is cut into items."""

import pytest

from infer.kernels.matmul_tasks import item_rows

ONE, MANY = 1, 64


@pytest.mark.parametrize("threads", [1, 2, 16, 64])
@pytest.mark.parametrize("rows", [16, 512, 8192, 100_000])
@pytest.mark.parametrize("columns", [32, 512, 4096, 13312])
def test_a_thread_has_several_items_where_there_is_work_enough(threads, rows, columns):
    weights = rows * columns
    step = item_rows(columns, ONE, weights, threads)
    assert step >= 1
    items = -(-rows // step)
    # Either there are enough to share, or items are as small as is worth another thread's coming.
    assert items >= 8 * threads or step * columns <= max(16384, columns)


def test_long_stretches_for_large_matrices_and_short_ones_for_small():
    assert item_rows(4096, ONE, 32768 * 4096, 2) * 4096 == 262144
    assert item_rows(512, ONE, 512 * 512, 2) * 512 == 16384


def test_many_inputs_pass_over_what_stays_in_the_cache():
    assert item_rows(4096, MANY, 32768 * 4096, 2) == item_rows(4096, MANY, 4096, 64) == 16
