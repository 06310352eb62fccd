"""Hy3 files with `hy.*` and `deepseek4.*` keys and `attn_*_proj` tensors."""

from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from infer.config import ModelConfig
from infer.families import hy3
from infer.session import Session
from infer.text.template import ChatTemplate
from infer.text.tokenizer import Tokenizer
from shared.experts import ExpertIndex, resident_tensors, trunk_layer_count
from shared.gguf_index import GgufIndex

PROJECTIONS = {"attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o"}
# Keys as that pull request's quantizer writes them: under `deepseek4.` these, under `hy.` the rest.
DEEPSEEK_KEYS = (
    "block_count",
    "embedding_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "expert_count",
    "expert_used_count",
)
ROLES = (
    "<｜hy_begin_of_sentence:opensource｜>",
    "<｜hy_User:opensource｜>",
    "<｜hy_Assistant:opensource｜>",
    "<｜reasoning_mode:opensource｜>",
    "<｜hy_eos:opensource｜>",
    "<think:opensource>",
    "</think:opensource>",
)


def _dialect_name(name):
    for ours, letter in PROJECTIONS.items():
        name = name.replace(f".{ours}.weight", f".attn_{letter}_proj.weight")
    return name.replace(".exp_probs_b", ".exp_probs_b.bias")


def _to_dialect(model):
    """The same model with the keys and names of the dialect, and none that it does not have."""
    ours = {key.removeprefix("hy_v3."): value for key, value in model.metadata.items()}
    model.metadata = {f"deepseek4.{key}": ours[key] for key in DEEPSEEK_KEYS} | {
        "deepseek4.attention.sliding_window": 0,
        "deepseek4.expert_shared_count": 1,
        "hy.first_k_dense_replace": 1,
        "hy.intermediate_size": ours["feed_forward_length"],
        "hy.expert_count": ours["expert_count"],
        "hy.expert_used_count": ours["expert_used_count"],
        "hy.expert_shared_count": 1,
        "hy.moe_intermediate_size": ours["expert_feed_forward_length"],
        "hy.routed_scaling_factor": ours["expert_weights_scale"],
        "hy.qk_norm": 1,
        "hy.moe_router_enable_expert_bias": 1,
        "tokenizer.ggml.tokens": ours["tokenizer.ggml.tokens"],
        "tokenizer.ggml.merges": ours["tokenizer.ggml.merges"],
    }
    model.tensors = {_dialect_name(name): tensor for name, tensor in model.tensors.items()}
    return model


def _model(gguf_factory):
    """With the embedding and the routers in F16, as the dialect's files have them."""
    model = gguf_factory.hy3_model()
    for name, tensor in model.tensors.items():
        if name == "token_embd.weight" or name.endswith(".ffn_gate_inp.weight"):
            data = tensor.weights().astype(np.float16).view(np.uint8)
            model.tensors[name] = gguf_factory.TinyTensor(tensor.shape, int(Type.F16), data)
    return model


@pytest.fixture
def files(gguf_factory, tmp_path):
    """One model twice: as llama.cpp has it, and in the dialect."""
    plain = _model(gguf_factory).write(tmp_path / "plain.gguf")
    return plain, _to_dialect(_model(gguf_factory)).write(tmp_path / "dialect.gguf")


def test_it_is_read_as_the_same_model(files):
    plain, dialect = map(GgufIndex.open, files)
    assert trunk_layer_count(dialect) == trunk_layer_count(plain)
    assert hy3.read_shape(dialect) == replace(hy3.read_shape(plain), context_length=262144)
    names = [tensor.name for tensor in resident_tensors(dialect)]
    assert names == [tensor.name for tensor in resident_tensors(plain)]
    experts, expected = ExpertIndex.from_gguf(dialect), ExpertIndex.from_gguf(plain)
    assert (experts.n_experts, experts.top_k) == (expected.n_experts, expected.top_k)
    for key in plain.metadata:
        if key.startswith("hy_v3.expert_") and "shared" not in key:
            assert dialect.metadata[key] == pytest.approx(plain.metadata[key])


def test_it_computes_the_same_logits(files):
    rows = []
    for path in files:
        config = ModelConfig(model=path, exact=True, host_cache="64M", ctx=64)
        with Session(config) as session:
            rows.append(session.engine.logits([5, 6, 200, 41]))
    assert (rows[0] == rows[1]).all()


def test_it_can_be_talked_to(gguf_factory, tmp_path):
    """Neither template nor token types nor bos and eos are in the file."""
    model = _to_dialect(_model(gguf_factory))
    tokens = model.metadata["tokenizer.ggml.tokens"]
    model.metadata["tokenizer.ggml.tokens"] = [*tokens[: -len(ROLES)], *ROLES]
    index = GgufIndex.open(model.write(tmp_path / "dialect.gguf"))
    assert "tokenizer.ggml.bos_token_id" not in index.metadata, "ids of another vocabulary"
    tokenizer = Tokenizer.from_metadata(index.metadata)
    first = len(tokens) - len(ROLES)
    assert tokenizer.stop_ids == {first + ROLES.index("<｜hy_eos:opensource｜>")}
    template = ChatTemplate.from_metadata(index.metadata, tokenizer)
    prompt = template.render_to_ids([{"role": "user", "content": "a"}])
    assert first + ROLES.index("<｜hy_User:opensource｜>") in prompt


def test_the_published_vocabulary_has_its_bos_and_eos(gguf_factory, tmp_path):
    model = _to_dialect(_model(gguf_factory))
    model.metadata["deepseek4.vocab_size"] = 120832
    metadata = GgufIndex.open(model.write(tmp_path / "dialect.gguf")).metadata
    assert metadata["tokenizer.ggml.bos_token_id"] == 120000
    assert metadata["tokenizer.ggml.eos_token_id"] == 120025
    assert metadata["tokenizer.ggml.pre"] == "hunyuan-dense"


def test_what_the_file_says_counts(gguf_factory, tmp_path):
    model = _to_dialect(_model(gguf_factory))
    model.metadata |= {"deepseek4.context_length": 99, "tokenizer.ggml.pre": "glm4"}
    metadata = GgufIndex.open(model.write(tmp_path / "dialect.gguf")).metadata
    assert metadata["hy_v3.context_length"] == 99
    assert metadata["tokenizer.ggml.pre"] == "glm4"


@pytest.mark.parametrize("architecture", ["hy_v3", "hy-v3"])
def test_files_of_other_dialects_stay_as_they_are(gguf_factory, tmp_path, architecture):
    model = gguf_factory.hy3_model(architecture=architecture)
    model.metadata["deepseek4.block_count"] = 99
    index = GgufIndex.open(model.write(tmp_path / "other.gguf"))
    assert set(model.metadata) <= set(index.metadata)
    assert index.tensors.keys() == model.tensors.keys()
    assert index.metadata[f"{architecture}.block_count"] == 3
