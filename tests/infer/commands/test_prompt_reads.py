"""What `infer bench` tells of a prompt's reads."""

import pytest

from infer.commands.prompt_reads import PromptReads


@pytest.mark.parametrize(
    ("slabs", "row"),
    [
        (0, "        0 slabs read for 82 experts touched in 1 chunk: 0.00 for each"),
        (1, "        1 slab read for 82 experts touched in 1 chunk: 0.01 for each"),
        (41_000, "   41,000 slabs read for 82 experts touched in 1 chunk: 500.00 for each"),
    ],
)
def test_the_number_stands_where_the_rates_above_do(slabs, row):
    assert PromptReads(1, 82, 0, slabs, 0, 0, 0).describe() == row
