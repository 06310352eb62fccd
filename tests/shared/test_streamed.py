"""What of a model can be copied layer by layer, by the names in its file."""

import gguf_glm
import pytest

from shared.errors import ProtocolMismatch
from shared.experts import resident_tensors
from shared.gguf_index import GgufIndex
from shared.mtp import open_served
from shared.streamed import chosen_layers, kept_tensors, streamable_layers


@pytest.fixture
def glm(tmp_path):
    return GgufIndex.open(gguf_glm.glm_model().write(tmp_path / "glm.gguf"))


def names_of(layout):
    return {placed.tensor.name for placed in layout.tensors}


def test_layers_with_experts_can_be(demo_model):
    layers = streamable_layers(GgufIndex.open(demo_model))
    assert list(layers) == [1, 2, 3, 4, 5, 6], "layer 0 is dense"
    attention = [f"attn_{part}" for part in ("q", "k", "v", "output")]
    shared = [f"ffn_{part}_shexp" for part in ("gate", "up", "down")]
    assert names_of(layers[3]) == {f"blk.3.{name}.weight" for name in attention + shared}


def test_what_is_read_out_of_turn_stays(glm):
    layers = streamable_layers(glm)
    kept = {tensor.name for tensor in kept_tensors(glm, layers)}
    assert layers
    for layer in layers:
        for name in ("attn_norm.weight", "attn_q_a_norm.weight", "ffn_gate_inp.weight"):
            assert f"blk.{layer}.{name}" in kept
    assert {"token_embd.weight", "output_norm.weight", "blk.0.ffn_down.weight"} <= kept


def test_every_resident_tensor_is_in_one_place(glm):
    layers = streamable_layers(glm)
    some = chosen_layers(glm, list(layers)[1:])
    copied = [name for layout in some.values() for name in names_of(layout)]
    kept = [tensor.name for tensor in kept_tensors(glm, some)]
    assert sorted(copied + kept) == sorted(tensor.name for tensor in resident_tensors(glm))


def test_in_a_buffer_they_lie_aligned_and_apart(glm):
    for layout in streamable_layers(glm).values():
        end = 0
        for placed in layout.tensors:
            assert placed.payload_offset % 256 == 0
            assert placed.payload_offset >= end
            end = placed.payload_offset + placed.tensor.byte_count
        assert end <= layout.total_bytes


def test_an_mtp_block_stays(shared_dir):
    index = open_served(shared_dir / "oracle" / "glm-mtp-udmix.gguf", "model")
    trunk = streamable_layers(open_served(shared_dir / "oracle" / "glm-mtp-udmix.gguf", ""))
    assert index.mtp
    assert list(streamable_layers(index)) == list(trunk)


@pytest.mark.parametrize("number", [0, 99, -1])
def test_another_daemons_idea_of_what_can_be_streamed_is_a_mismatch(demo_model, number):
    with pytest.raises(ProtocolMismatch):
        chosen_layers(GgufIndex.open(demo_model), [1, number])
