"""Slots in the arena: nothing overlaps, and any direct read of a slab fits its stretches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.arena import PART_COUNT, ArenaLayout, round_up, slot_bytes, stretch_bytes

aligns = st.sampled_from([1, 512, 4096])
parts = st.tuples(*[st.integers(1, 20_000)] * PART_COUNT)
layouts = st.builds(
    lambda classes, align: ArenaLayout(
        tuple(part_bytes for part_bytes, _ in classes), tuple(n for _, n in classes), align
    ),
    st.lists(st.tuples(parts, st.integers(0, 5)), min_size=1, max_size=3),
    aligns,
)


@pytest.mark.parametrize(
    ("value", "multiple", "rounded"), [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16), (5, 1, 5)]
)
def test_round_up(value, multiple, rounded):
    assert round_up(value, multiple) == rounded


@given(aligns, st.integers(1, 100_000), st.integers(0, 1 << 40))
def test_a_widened_read_fits_its_stretch(align, payload_bytes, file_offset):
    begin = file_offset - file_offset % align
    end = -(-(file_offset + payload_bytes) // align) * align
    assert end - begin <= stretch_bytes(payload_bytes, align)
    assert stretch_bytes(payload_bytes, align) % align == 0


@given(layouts)
def test_stretches_tile_the_arena(layout):
    stretches = layout.stretches()
    assert stretches.shape == (layout.slot_count, PART_COUNT, 2)
    flat = stretches.reshape(-1, 2)
    ends = np.cumsum(flat[:, 1])
    assert flat[:, 0].tolist() == [0, *ends[:-1].tolist()][: len(flat)]
    assert layout.total_bytes == (int(ends[-1]) if len(ends) else 0)
    assert not np.any(flat % layout.align)


@given(layouts)
def test_slots_of_a_class_lie_together_and_have_its_stretches(layout):
    stretches = layout.stretches()
    slot = 0
    classes = zip(layout.class_part_bytes, layout.class_slot_counts, strict=True)
    for class_id, (part_bytes, count) in enumerate(classes):
        assert layout.first_slot(class_id) == slot
        lengths = [stretch_bytes(part, layout.align) for part in part_bytes]
        assert stretches[slot : slot + count, :, 1].tolist() == [lengths] * count
        assert slot_bytes(part_bytes, layout.align) == sum(lengths)
        slot += count
    assert layout.slot_count == slot
