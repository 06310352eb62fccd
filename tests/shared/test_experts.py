"""Where the experts lie, compared with the bytes that the gguf package finds."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from shared.errors import MalformedModel, UnsupportedModel
from shared.experts import PARTS, ExpertIndex, resident_tensors, trunk_layer_count
from shared.gguf_index import GgufIndex


def slab_bytes_of_reader(paths, layer, expert):
    """The expert's gate, up and down as the gguf package slices them."""
    tensors = {t.name: t for path in paths for t in gguf.GGUFReader(path).tensors}
    stacks = [tensors[f"blk.{layer}.ffn_{part}_exps.weight"] for part in PARTS]
    return [stack.data.reshape(int(stack.shape[2]), -1)[expert].tobytes() for stack in stacks]


def bytes_at(index, extents):
    parts = []
    for extent in extents:
        with index.paths[extent.file_index].open("rb") as file:
            file.seek(extent.offset)
            parts.append(file.read(extent.length))
    return parts


@pytest.fixture
def mixed(tmp_path, gguf_factory):
    """Layers: 0 dense, 1 and 3 IQ2/Q2_K, 2 Q4_K, then an MTP block."""
    model = gguf_factory.hy3_model(
        n_layers=4, mtp=True, layer_expert_types={2: [Type.Q4_K] * 3}, tokenizer=False
    )
    return GgufIndex.open(model.write(tmp_path / "m.gguf"))


def test_counts_classes_and_arrays(mixed):
    experts = ExpertIndex.from_gguf(mixed)
    assert (experts.n_layers, experts.n_experts, experts.top_k) == (4, 8, 2)
    assert experts.layer_class.tolist() == [-1, 0, 1, 0]
    iq2, q4 = experts.classes
    assert (iq2.class_id, iq2.layers, iq2.expert_count) == (0, (1, 3), 16)
    assert iq2.part_bytes == (256 * 66, 256 * 66, 256 * 84)
    assert iq2.slab_bytes == 256 * (66 + 66 + 84)
    assert (q4.class_id, q4.layers, q4.expert_count) == (1, (2,), 8)
    assert q4.part_bytes == (256 * 144,) * 3
    assert experts.part_types.tolist() == [[-1] * 3, [16, 16, 10], [12] * 3, [16, 16, 10]]
    assert experts.part_files.tolist() == [[-1] * 3, [0] * 3, [0] * 3, [0] * 3]
    assert experts.part_offsets.shape == (4, 8, 3)
    assert (experts.part_offsets[0] == -1).all()
    with pytest.raises(ValueError, match="read-only"):
        experts.part_offsets[1, 0, 0] = 0


def test_extents_hold_the_experts_bytes(mixed):
    experts = ExpertIndex.from_gguf(mixed)
    for layer in (1, 2, 3):
        for expert in (0, 5, 7):
            extents = experts.extents(layer, expert)
            assert [e.offset for e in extents] == experts.part_offsets[layer, expert].tolist()
            assert bytes_at(mixed, extents) == slab_bytes_of_reader(mixed.paths, layer, expert)


def test_extents_of_a_split_model(tmp_path, gguf_factory):
    model = gguf_factory.hy3_model(tokenizer=False)
    index = GgufIndex.open(model.write(tmp_path / "m.gguf", shard_tensors=8))
    experts = ExpertIndex.from_gguf(index)
    assert len(set(experts.part_files.ravel().tolist()) - {-1}) > 1
    for layer in (1, 2):
        extents = experts.extents(layer, 3)
        assert bytes_at(index, extents) == slab_bytes_of_reader(index.paths, layer, 3)


def test_dense_layers_and_numbers_out_of_range_are_our_bug(mixed):
    experts = ExpertIndex.from_gguf(mixed)
    for layer, expert in [(0, 0), (4, 0), (-1, 0), (1, 8), (1, -1)]:
        with pytest.raises(AssertionError):
            experts.extents(layer, expert)


def test_resident_tensors_leave_out_experts_and_mtp(mixed):
    resident = resident_tensors(mixed)
    assert [t.offset for t in resident] == sorted(t.offset for t in resident)
    left_out = set(mixed.tensors) - {t.name for t in resident}
    routed = {f"blk.{n}.ffn_{part}_exps.weight" for n in (1, 2, 3) for part in PARTS}
    assert left_out == routed | {name for name in mixed.tensors if name.startswith("blk.4.")}
    assert "blk.1.ffn_gate_shexp.weight" not in left_out


def test_names_that_look_like_blocks_stay_resident(tmp_path, gguf_factory):
    model = gguf_factory.hy3_model(tokenizer=False)
    odd = ["blk.x.weight", f"blk.{'9' * 50}.weight", "blkA9.weight", "blk.weight"]
    for name in odd:
        model.tensors[name] = gguf_factory.float_tensor(np.ones(8))
    index = GgufIndex.open(model.write(tmp_path / "m.gguf"))
    assert set(odd) <= {tensor.name for tensor in resident_tensors(index)}


def test_trained_model(demo_model):
    experts = ExpertIndex.from_gguf(GgufIndex.open(demo_model))
    assert (experts.n_layers, experts.n_experts, experts.top_k) == (7, 16, 4)
    assert experts.layer_class.tolist() == [-1, 0, 0, 0, 0, 0, 1]


def test_every_oracle(shared_dir):
    paths = sorted(shared_dir.glob("oracle/*.gguf"))
    assert len(paths) > 10
    for path in paths:
        index = GgufIndex.open(path)
        experts = ExpertIndex.from_gguf(index)
        names = set(index.tensors)
        mtp = {n for n in names if n.startswith(f"blk.{experts.n_layers}.")}
        assert any("nextn" in name for name in mtp) == ("-mtp-" in path.name)
        routed = {name for name in names - mtp if "_exps." in name}
        assert {tensor.name for tensor in resident_tensors(index)} == names - mtp - routed
        assert sum(c.expert_count for c in experts.classes) * 3 == len(routed) * experts.n_experts
        layer = experts.n_layers - 1
        expert = experts.n_experts - 1
        extents = experts.extents(layer, expert)
        assert bytes_at(index, extents) == slab_bytes_of_reader([path], layer, expert)


def reshaped(gguf_factory, *shape):
    rng = np.random.default_rng(0)
    return gguf_factory.random_tensor(rng, shape, Type.Q8_0)


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("blk.1.ffn_gate_exps.weight", (256, 256), r"gate_exps.* not \(in, out, 8\)"),
        ("blk.1.ffn_gate_exps.weight", (256, 256, 4), r"gate_exps.* not \(in, out, 8\)"),
        ("blk.1.ffn_gate_exps.weight", (256, 128, 8), r"up_exps.* demands \(256, 128, 8\)"),
        ("blk.2.ffn_up_exps.weight", (256, 512, 8), r"up_exps.* demands \(256, 256, 8\)"),
        ("blk.2.ffn_up_exps.weight", (256, 256, 7), r"up_exps.* demands \(256, 256, 8\)"),
        ("blk.2.ffn_down_exps.weight", (256, 128, 8), r"down_exps.* demands \(256, 256, 8\)"),
        ("blk.2.ffn_down_exps.weight", (256, 256), r"down_exps.* demands \(256, 256, 8\)"),
    ],
)
def test_shapes_that_contradict_each_other(tmp_path, gguf_factory, name, shape, reason):
    model = gguf_factory.hy3_model(tokenizer=False)
    model.tensors[name] = reshaped(gguf_factory, *shape)
    index = GgufIndex.open(model.write(tmp_path / "m.gguf"))
    with pytest.raises(MalformedModel, match=reason) as caught:
        ExpertIndex.from_gguf(index)
    assert caught.value.remedy


@pytest.mark.parametrize("part", PARTS)
def test_missing_tensor_is_named(tmp_path, gguf_factory, part):
    model = gguf_factory.hy3_model(tokenizer=False)
    name = f"blk.2.ffn_{part}_exps.weight"
    del model.tensors[name]
    index = GgufIndex.open(model.write(tmp_path / "m.gguf"))
    with pytest.raises(MalformedModel, match=f"lacks the tensor {name}"):
        ExpertIndex.from_gguf(index)


@pytest.mark.parametrize("name", ["block_count", "expert_count", "expert_used_count"])
def test_missing_key_is_named(tmp_path, gguf_factory, name):
    model = gguf_factory.hy3_model(architecture="hy-v3", tokenizer=False)
    del model.metadata[f"hy-v3.{name}"]
    index = GgufIndex.open(model.write(tmp_path / "m.gguf"))
    with pytest.raises(MalformedModel, match=rf"lacks the key 'hy-v3\.{name}'"):
        ExpertIndex.from_gguf(index)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("expert_count", 0, "expert_count 0 is absurd"),
        ("expert_count", 1 << 31, "expert_count 2147483648 is absurd"),
        ("expert_count", 7, r"not \(in, out, 7\)"),
        ("expert_used_count", 0, "expert_used_count 0 of 8"),
        ("expert_used_count", 9, "expert_used_count 9 of 8"),
        ("block_count", 0, "block_count 0"),
        ("block_count", 1 << 31, "block_count 2147483648"),
        ("nextn_predict_layers", 3, "block_count 3 with nextn_predict_layers 3"),
        ("block_count", "three", "is not a whole number"),
    ],
)
def test_absurd_key_is_refused(tmp_path, gguf_factory, name, value, reason):
    model = gguf_factory.hy3_model(tokenizer=False)
    model.metadata[f"hy_v3.{name}"] = value
    index = GgufIndex.open(model.write(tmp_path / "m.gguf"))
    with pytest.raises(MalformedModel, match=reason):
        ExpertIndex.from_gguf(index)


def test_dense_model_is_refused(tmp_path, gguf_factory):
    model = gguf_factory.hy3_model(n_layers=2, dense_layers=2, tokenizer=False)
    index = GgufIndex.open(model.write(tmp_path / "m.gguf"))
    assert trunk_layer_count(index) == 2
    with pytest.raises(UnsupportedModel, match="no routed experts"):
        ExpertIndex.from_gguf(index)
