"""What is served with an MTP block: the model's own one, one from another file, none."""

import gguf
import pytest

from shared.daemon_options import OWN_MTP
from shared.errors import UnsupportedModel
from shared.experts import PARTS, ExpertIndex, resident_tensors
from shared.gguf_index import GgufIndex
from shared.mtp import open_served

Q2_K = gguf.GGMLQuantizationType.Q2_K
ROUTED = {f"blk.3.ffn_{part}_exps.weight" for part in PARTS}


@pytest.fixture
def tiny(gguf_factory):
    return gguf_factory.hy3_model(mtp=True, layer_expert_types={3: [Q2_K] * 3}, tokenizer=False)


def block_of(model):
    return {name: t for name, t in model.tensors.items() if name.startswith("blk.3.")}


def resident_names(index):
    return {tensor.name for tensor in resident_tensors(index)}


def bytes_of(index, tensor):
    with index.paths[tensor.file_index].open("rb") as file:
        file.seek(tensor.offset)
        return file.read(tensor.byte_count)


def test_it_costs_nothing_unless_it_is_asked_for(tiny, tmp_path):
    path = tiny.write(tmp_path / "m.gguf")
    plain, served = (open_served(path, mtp) for mtp in ("", OWN_MTP))
    assert plain == GgufIndex.open(path)
    experts, with_block = ExpertIndex.from_gguf(plain), ExpertIndex.from_gguf(served)
    assert (experts.n_layers, with_block.n_layers) == (3, 4)
    assert with_block.classes[: len(experts.classes)] == experts.classes
    [own_class] = with_block.classes[len(experts.classes) :]
    assert (own_class.layers, own_class.part_bytes) == ((3,), (256 * 84,) * 3)
    assert resident_names(served) - resident_names(plain) == set(block_of(tiny)) - ROUTED


@pytest.mark.parametrize("shard_tensors", [0, 20])
def test_a_file_of_its_own_is_one_more_shard(tiny, gguf_factory, tmp_path, shard_tensors):
    """Whatever number its block has there, and whatever block the model has itself."""
    other = gguf_factory.hy3_model(
        mtp=True, layer_expert_types={3: [Q2_K] * 3}, tokenizer=False, seed=9
    )
    block = block_of(other)
    other.tensors = {name.replace("blk.3.", "blk.78."): t for name, t in block.items()}
    apart = GgufIndex.open(other.write(tmp_path / "other.gguf"))
    model = tiny.write(tmp_path / "m.gguf", shard_tensors=shard_tensors)
    plain, served = GgufIndex.open(model), open_served(model, str(apart.paths[0]))
    assert served.paths == (*plain.paths, *apart.paths)
    assert served.fingerprints == (*plain.fingerprints, *apart.fingerprints)
    assert set(served.tensors) == set(plain.tensors)
    for name, tensor in block.items():
        assert served.tensors[name].name == name
        assert bytes_of(served, served.tensors[name]) == tensor.data.tobytes()
    for name in set(plain.tensors) - set(block):
        assert served.tensors[name] == plain.tensors[name]
    experts = ExpertIndex.from_gguf(served)
    assert set(experts.part_files[3]) == {len(plain.paths)}
    [extent, _, _] = experts.extents(3, 5)
    assert extent.file_index == len(plain.paths)


def test_what_has_no_block_is_refused(tiny, gguf_factory, tmp_path):
    plain = gguf_factory.hy3_model(tokenizer=False).write(tmp_path / "plain.gguf")
    with pytest.raises(UnsupportedModel, match="has no MTP block") as refusal:
        open_served(plain, OWN_MTP)
    assert "--mtp FILE" in refusal.value.remedy
    with pytest.raises(UnsupportedModel, match="must have one MTP block; those it has: none"):
        open_served(plain, str(plain))
    tiny.tensors["blk.9.nextn.eh_proj.weight"] = tiny.tensors["blk.3.nextn.eh_proj.weight"]
    two = tiny.write(tmp_path / "two.gguf")
    with pytest.raises(UnsupportedModel, match="those it has: 3, 9"):
        open_served(plain, str(two))


def test_oracles(shared_dir):
    for path in sorted((shared_dir / "oracle").glob("*-mtp-*.gguf")):
        plain, served = (ExpertIndex.from_gguf(open_served(path, m)) for m in ("", OWN_MTP))
        assert served.n_layers == plain.n_layers + 1
        assert len(served.classes) == len(plain.classes)  # the block's experts are of their size
        assert served.classes[-1].expert_count == plain.classes[-1].expert_count + 16
