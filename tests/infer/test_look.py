"""`infer inspect`: figures against sums over the file made by the gguf package."""

import gguf

from infer.commands.look import describe
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
    assert "unsupported" not in values


def test_what_is_not_supported_says_why(gguf_factory, tmp_path):
    model = gguf_factory.hy3_model()
    model.architecture = "other"
    for key in [key for key in model.metadata if key.startswith("hy_v3.")]:
        model.metadata[key.replace("hy_v3.", "other.")] = model.metadata.pop(key)
    values = describe(GgufIndex.open(model.write(tmp_path / "other.gguf")))
    assert "'other'" in values["unsupported"]
    assert values["expert_bytes"] > 0
