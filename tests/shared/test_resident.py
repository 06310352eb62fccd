"""Where resident tensors lie in the region that the daemon shares."""

from hypothesis import given
from hypothesis import strategies as st

from shared.gguf_shard import TensorInfo
from shared.resident import resident_layout

ALIGNS = st.sampled_from([1, 512, 4096])
tensors = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 10**9), st.integers(0, 50_000)), max_size=12
).map(
    lambda places: [
        TensorInfo(f"t{number}", (1,), 0, file_index, offset, byte_count)
        for number, (file_index, offset, byte_count) in enumerate(places)
    ]
)


@given(tensors, ALIGNS)
def test_every_tensor_has_a_stretch_that_takes_its_widened_read(infos, align):
    layout = resident_layout(infos, align)
    assert {placed.tensor for placed in layout.tensors} == set(infos)
    end = 0
    for placed in layout.tensors:
        tensor = placed.tensor
        assert placed.offset == end
        assert placed.offset % align == placed.capacity_bytes % align == 0
        assert placed.payload_offset - placed.offset == tensor.offset % align
        end += placed.capacity_bytes
        assert placed.payload_offset + tensor.byte_count <= end
    assert layout.total_bytes == (end or align)


@given(tensors, ALIGNS, st.randoms())
def test_both_sides_derive_the_same_layout_in_file_order(infos, align, random):
    shuffled = list(infos)
    random.shuffle(shuffled)
    places = [(p.tensor.file_index, p.tensor.offset) for p in resident_layout(infos, align).tensors]
    assert places == sorted(places)
    if len(set(places)) == len(places):
        assert resident_layout(shuffled, align) == resident_layout(infos, align)
