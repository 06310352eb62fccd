"""Which layers own an index, and that nobody keeps the weights of those that do not."""

import gguf_glm
import pytest

from shared.errors import MalformedModel
from shared.experts import ExpertIndex, resident_tensors
from shared.gguf_index import GgufIndex
from shared.index_layers import index_layers


@pytest.fixture
def opened(tmp_path):
    """Builds a GLM file, without a tokenizer; its index."""

    def build(**knobs) -> GgufIndex:
        model = gguf_glm.glm_model(**({"tokenizer": False, "n_experts": 2} | knobs))
        return GgufIndex.open(model.write(tmp_path / "glm.gguf"))

    return build


def test_the_file_says(opened):
    assert index_layers(opened(), 4) == (0, 1, 3)


def test_a_file_that_does_not_say(opened):
    assert index_layers(opened(index_layers=None), 4) == (0, 1, 2, 3)
    long = opened(index_layers=None, context=1 << 20, n_layers=1)
    # GLM-5.2's 78 layers: 21 own an index
    expected = (0, 1, *range(2, 78, 4))
    assert index_layers(long, 78) == expected
    assert len(expected) == 21


def test_other_models_have_none(tmp_path, gguf_factory):
    model = gguf_factory.hy3_model(tokenizer=False)
    assert index_layers(GgufIndex.open(model.write(tmp_path / "m.gguf")), 3) == ()


@pytest.mark.parametrize("given", [[False] * 4, [True], [1, 2, 0, 1], "FFSF"])
def test_a_list_that_cannot_be_is_refused(tmp_path, given):
    model = gguf_glm.glm_model(tokenizer=False)
    model.metadata["glm-dsa.attention.indexer.types"] = given
    index = GgufIndex.open(model.write(tmp_path / "glm.gguf"))
    with pytest.raises(MalformedModel, match="of 4 layers"):
        index_layers(index, 4)


def test_indexers_that_are_not_read_are_not_resident(opened):
    names = {tensor.name for tensor in resident_tensors(opened(index_everywhere=True))}
    assert names == {tensor.name for tensor in resident_tensors(opened())}
    assert "blk.1.indexer.proj.weight" in names
    assert "blk.2.indexer.proj.weight" not in names


def test_experts_of_a_glm_file(opened):
    index = opened(n_experts=4, dense_layers=2)
    experts = ExpertIndex.from_gguf(index)
    assert experts.layer_class.tolist() == [-1, -1, 0, 0]
    names = {tensor.name for tensor in resident_tensors(index)}
    assert names == {name for name in index.tensors if "_exps" not in name}
