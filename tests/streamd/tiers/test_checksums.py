"""Slabs are remembered by their sums; parts count as they lie, whatever memory they are in."""

import pytest

from shared.errors import ReadFailed
from streamd.tiers.checksums import SlabChecksums

PARTS = [memoryview(b"gate" * 100), memoryview(b"up" * 100), memoryview(b"down" * 100)]


@pytest.fixture
def checksums() -> SlabChecksums:
    checksums = SlabChecksums(n_layers=3, n_experts=4)
    assert checksums.check(1, 2, PARTS) is None
    return checksums


def test_the_same_bytes_pass_from_other_memory(checksums):
    assert checksums.check(1, 2, [memoryview(bytes(part)) for part in PARTS]) is None
    assert checksums.checked_count == 1


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("at", [0, 57, -1])
def test_one_flipped_bit_is_noticed_and_named(checksums, part, at):
    changed = [bytearray(each) for each in PARTS]
    changed[part][at] ^= 1
    error = checksums.check(1, 2, [memoryview(each) for each in changed])
    assert isinstance(error, ReadFailed)
    assert "expert 2 of layer 1" in error.message
    assert "scrub" in error.remedy
    assert checksums.check(1, 2, PARTS) is None, "the first reading stays what counts"


def test_every_expert_has_a_sum_of_its_own(checksums):
    other = [memoryview(b"another slab")]
    assert checksums.check(2, 1, other) is None
    assert checksums.check(2, 1, other) is None
    assert checksums.check(1, 2, PARTS) is None
    assert checksums.checked_count == 2
