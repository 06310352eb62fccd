"""`infer inspect`: figures against sums over the file made by the gguf package."""

import argparse
import json

import gguf
import pytest

from infer.commands.inspect import describe, inspect, open_to_look, ranges
from shared.errors import MalformedModel
from shared.gguf_index import GgufIndex


def test_sizes_are_those_of_the_file(demo_model):
    values = describe(GgufIndex.open(demo_model))
    tensors = gguf.GGUFReader(demo_model).tensors
    experts = sum(int(t.n_bytes) for t in tensors if "_exps." in t.name)
    assert values["expert_bytes"] == experts
    assert values["resident_bytes"] == sum(int(t.n_bytes) for t in tensors) - experts
    assert values["cold_bytes_per_token"] == experts * 4 // 16
    assert values["kv_bytes_per_token"] == 7 * 2 * 2 * 64 * 2
    assert values["tensor_types"]["IQ2_XXS"] == 10
    assert values["family"] == "hy3"
    assert values["file_bytes"] == demo_model.stat().st_size
    assert not {"unsupported", "incomplete"} & values.keys()


def test_types_are_told_by_layer_and_slabs_by_class(gguf_factory, tmp_path):
    q4 = (gguf.GGMLQuantizationType.Q4_K,) * 3
    model = gguf_factory.hy3_model(n_layers=4, mtp=True, layer_expert_types={2: q4})
    values = describe(GgufIndex.open(model.write(tmp_path / "mixed.gguf")))
    mixes = {mix["layers"]: mix["types"] for mix in values["layer_types"]}
    assert mixes.keys() == {"0", "1,3", "2", "4"}
    assert mixes["1,3"]["ffn_down_exps"] == "Q2_K"
    assert mixes["2"]["ffn_down_exps"] == "Q4_K"
    assert "ffn_gate_exps" not in mixes["0"]
    assert "nextn.eh_proj" in mixes["4"]
    classes = {c["layers"]: c for c in values["slab_classes"]}
    assert classes["2"]["slab_bytes"] == 3 * 256 * 256 // 256 * 144
    assert classes["1,3"]["part_bytes"] == [256 * 66, 256 * 66, 256 * 84]
    assert values["mtp_bytes"] == sum(
        tensor.data.nbytes for name, tensor in model.tensors.items() if name.startswith("blk.4.")
    )


def test_what_is_not_supported_says_why(gguf_factory, tmp_path):
    model = gguf_factory.hy3_model()
    model.architecture = "other"
    for key in [key for key in model.metadata if key.startswith("hy_v3.")]:
        model.metadata[key.replace("hy_v3.", "other.")] = model.metadata.pop(key)
    model.metadata["tokenizer.ggml.pre"] = "nonsense"
    values = describe(GgufIndex.open(model.write(tmp_path / "other.gguf")))
    family, tokenizer = values["unsupported"]
    assert "'other'" in family
    assert "nonsense" in tokenizer
    assert values["expert_bytes"] > 0


def test_a_type_that_nothing_multiplies_is_named(gguf_factory, tmp_path):
    model = gguf_factory.hy3_model()
    name = "blk.1.attn_q.weight"
    shape = model.tensors[name].shape
    model.tensors[name] = gguf_factory.TinyTensor(
        shape, int(gguf.GGMLQuantizationType.I8), model.tensors[name].data[:, : shape[0]]
    )
    values = describe(GgufIndex.open(model.write(tmp_path / "odd.gguf")))
    assert any("I8" in problem for problem in values["unsupported"])


@pytest.fixture
def whole(gguf_factory, tmp_path):
    return gguf_factory.hy3_model().write(tmp_path / "whole.gguf")


def cut(path, byte_count):
    shorter = path.with_name("cut.gguf")
    shorter.write_bytes(path.read_bytes()[:byte_count])
    return shorter


def header_bytes(path):
    return min(t.offset for t in GgufIndex.open(path).tensors.values())


def described(path):
    return describe(*open_to_look(path))


def test_a_header_alone_is_enough(whole):
    expected, values = described(whole), described(cut(whole, header_bytes(whole)))
    (missing,) = values.pop("incomplete")
    assert "a header alone" in missing
    for changed in ("file", "file_bytes"):
        del expected[changed], values[changed]
    assert values == expected


def test_a_file_cut_in_its_data(whole):
    (missing,) = described(cut(whole, whole.stat().st_size - 1))["incomplete"]
    assert missing.startswith("1 of ")


@pytest.mark.parametrize("part", range(1, 20))
def test_a_file_cut_in_its_header_is_described_as_far_as_it_goes(whole, part):
    values = described(cut(whole, 24 + (header_bytes(whole) - 100) * part // 20))
    assert values["incomplete"][0].endswith("the file ends inside its header")
    assert "tensors" in values["incomplete"][-1]
    assert values["architecture"] in ("?", "hy_v3")
    assert "unsupported" not in values, "what is missing may only be behind the end"


def test_what_is_read_of_a_cut_file_is_judged(gguf_factory, tmp_path):
    model = gguf_factory.hy3_model()
    model.architecture = "other"
    other = model.write(tmp_path / "other.gguf")
    (problem,) = described(cut(other, 1000))["unsupported"]
    assert "architecture 'other', which is not supported" in problem


def test_the_first_key_is_there_when_the_second_is_cut(whole):
    values = described(cut(whole, 24 + 8 + len("general.architecture") + 4 + 8 + 5 + 3))
    assert values["architecture"] == "hy_v3"
    assert values["incomplete"][-1].startswith("read: 1 of ")


def test_a_shard_without_its_siblings(gguf_factory, tmp_path):
    first = gguf_factory.hy3_model().write(tmp_path / "s.gguf", shard_tensors=20)
    next(tmp_path.glob("s-00002-*")).unlink()
    values = described(first)
    assert "is missing" in values["incomplete"][0]
    assert values["tensors"] == 20
    assert values["family"] == "hy3"


def test_what_is_no_gguf_is_refused(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"not a model at all, but long enough to be one")
    with pytest.raises(MalformedModel, match="is not a GGUF file"):
        open_to_look(path)


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_printed(whole, as_json, tensors, capsys):
    arguments = argparse.Namespace(file=whole, json=as_json, tensors=tensors)
    assert inspect(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    names = [tensor.name for tensor in gguf.GGUFReader(whole).tensors]
    if as_json:
        values = json.loads(out)
        assert values["layers"] == 3
        found = [tensor["name"] for tensor in values.get("tensors", [])] if tensors else []
        assert found == (names if tensors else [])
        return
    assert "\nfamily                   hy3\n" in out
    assert "  1-2: " in out
    assert "IQ2_XXS ffn_gate_exps ffn_up_exps" in out
    assert all(name in out for name in names) == tensors


def test_ranges():
    assert ranges([1, 2, 3, 4, 5, 8]) == "1-5,8"
    assert ranges([]) == ""
