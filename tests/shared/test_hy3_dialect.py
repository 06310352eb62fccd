"""Hy3 files with `hy.*` and `deepseek4.*` keys and `attn_*_proj` tensors."""

import pytest

from infer.config import ModelConfig
from infer.families import hy3
from infer.session import Session
from shared.errors import MalformedModel
from shared.experts import ExpertIndex, resident_tensors, trunk_layer_count
from shared.fingerprint import Fingerprint
from shared.gguf_index import GgufIndex, TensorInfo
from shared.gguf_values import Metadata
from shared.hy3_dialect import translate
from shared.quants import TensorType

PROJECTIONS = {"attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o"}
OWN_KEYS = ("expert_used_count", "expert_weights_scale", "rope.freq_base")


def _dialect_name(name):
    for ours, letter in PROJECTIONS.items():
        name = name.replace(f".{ours}.weight", f".attn_{letter}_proj.weight")
    return name.replace(".exp_probs_b", ".ffn_gate_exps_b.bias")


def _to_dialect(model):
    """The same model; some keys under `hy.`, some under `deepseek4.`, with another router there."""
    metadata = {}
    for key, value in model.metadata.items():
        name = key.removeprefix("hy_v3.")
        if name == key:
            metadata[key] = value
        elif name in OWN_KEYS:
            metadata[f"hy.{name}"] = value
            metadata[f"deepseek4.{name}"] = 1
        else:
            metadata[f"deepseek4.{name}"] = value
    metadata |= {"deepseek4.expert_gating_func": 4, "deepseek4.rope.dimension_count": 32}
    model.metadata = metadata
    model.tensors = {_dialect_name(name): tensor for name, tensor in model.tensors.items()}
    return model


@pytest.mark.parametrize("mtp", [False, True])
def test_it_is_read_as_the_same_model(gguf_factory, tmp_path, mtp):
    def make():
        return gguf_factory.hy3_model(mtp=mtp)

    plain = GgufIndex.open(make().write(tmp_path / "plain.gguf"))
    dialect = GgufIndex.open(_to_dialect(make()).write(tmp_path / "dialect.gguf"))
    assert trunk_layer_count(dialect) == trunk_layer_count(plain)
    assert hy3.read_shape(dialect) == hy3.read_shape(plain)
    names = [tensor.name for tensor in resident_tensors(dialect)]
    assert names == [tensor.name for tensor in resident_tensors(plain)]
    experts, expected = ExpertIndex.from_gguf(dialect), ExpertIndex.from_gguf(plain)
    assert (experts.n_experts, experts.top_k) == (expected.n_experts, expected.top_k)
    for key in OWN_KEYS:
        assert dialect.metadata[f"hy_v3.{key}"] == pytest.approx(plain.metadata[f"hy_v3.{key}"])
    assert dialect.metadata["hy_v3.rope.dimension_count"] == 64
    assert "hy_v3.expert_gating_func" not in dialect.metadata


def test_arrays_can_still_be_read(gguf_factory, tmp_path):
    model = _to_dialect(gguf_factory.hy3_model())
    index = GgufIndex.open(model.write(tmp_path / "dialect.gguf"))
    assert index.metadata["tokenizer.ggml.tokens"] == model.metadata["tokenizer.ggml.tokens"]


def test_what_neither_keys_nor_shapes_tell_is_not_guessed(gguf_factory, tmp_path):
    """Only the published model's own values stand in, and this is another one."""
    model = _to_dialect(gguf_factory.hy3_model())
    del model.metadata["hy.expert_used_count"], model.metadata["deepseek4.expert_used_count"]
    index = GgufIndex.open(model.write(tmp_path / "dialect.gguf"))
    with pytest.raises(MalformedModel, match="expert_used_count"):
        ExpertIndex.from_gguf(index)


def test_other_architectures_stay_as_they_are(gguf_factory, tmp_path):
    model = gguf_factory.hy3_model(architecture="hy-v3")
    model.metadata["deepseek4.block_count"] = 99
    index = GgufIndex.open(model.write(tmp_path / "other.gguf"))
    assert set(model.metadata) <= set(index.metadata)
    assert index.tensors.keys() == model.tensors.keys()
    assert index.metadata["hy-v3.block_count"] == 3


def test_the_published_model_needs_no_keys_but_its_tensors(tmp_path, gguf_factory):
    tensors = {
        name: TensorInfo(name, shape, TensorType.Q8_0, 0, 0, 0)
        for name, shape in {
            "token_embd.weight": (4096, 120832),
            "blk.0.attn_q_proj.weight": (4096, 8192),
            "blk.0.attn_k_proj.weight": (4096, 1024),
            "blk.0.attn_q_norm.weight": (128,),
            "blk.0.ffn_gate.weight": (4096, 13312),
            "blk.79.ffn_gate_exps.weight": (4096, 1536, 192),
            "blk.79.ffn_gate_shexp.weight": (4096, 1536),
        }.items()
    }
    path = gguf_factory.hy3_model().write(tmp_path / "any.gguf")
    metadata = Metadata(path, Fingerprint(0, 0, 0, 0), {"deepseek4.name": "HYV3"})
    keys, _ = translate("hy_v3", metadata, tensors)
    expected = {
        "block_count": 80,
        "embedding_length": 4096,
        "attention.head_count": 64,
        "attention.head_count_kv": 8,
        "expert_count": 192,
        "expert_used_count": 8,
        "rope.freq_base": 11158840.0,
        "expert_weights_scale": 2.826,
        "nextn_predict_layers": 0,
    }
    assert {key: keys[f"hy_v3.{key}"] for key in expected} == expected


def test_it_computes_the_same_logits(gguf_factory, tmp_path):
    plain = gguf_factory.hy3_model().write(tmp_path / "plain.gguf")
    dialect = _to_dialect(gguf_factory.hy3_model()).write(tmp_path / "dialect.gguf")
    rows = []
    for path in (plain, dialect):
        config = ModelConfig(model=path, exact=True, host_cache="64M", ctx=64)
        with Session(config) as session:
            rows.append(session.engine.logits([5, 6, 200, 41]))
    assert (rows[0] == rows[1]).all()
