"""Random GLM models against transformers' own implementation, computed from the same weights."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_factory import add_value

from infer.kernels.ggml_cpu import GgmlKernels

transformers = pytest.importorskip("transformers", reason="needs the extra `oracle`")

TOKENS, VOCAB = 41, 131
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in ("q_a", "q_b")},
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_output": "self_attn.o_proj",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
# Every width is odd in some way; each has one thing the others have not.
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 92,
    "intermediate_size": 118,
    "moe_intermediate_size": 46,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 74,
    "kv_lora_rank": 58,
    "qk_nope_head_dim": 22,
    "qk_rope_head_dim": 12,
    "head_dim": 12,
    "v_head_dim": 26,
    "index_n_heads": 13,
    "index_head_dim": 18,
    "index_topk": 7,
    "n_routed_experts": 11,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 12345.0},
}
CONFIGURATIONS = {
    "another pattern of indices": {
        "num_hidden_layers": 7,
        "indexer_types": ["full", "shared", "shared", "full", "full", "shared", "full"],
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse", "sparse", "sparse"],
    },
    "top-k above the context": {
        "num_hidden_layers": 3,
        "index_topk": 64,
        "indexer_types": ["full", "shared", "full"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "n_shared_experts": 2,
    },
    "one dense layer, 5 heads": {
        "num_hidden_layers": 4,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "index_n_heads": 10,
        "index_topk": 12,
        "indexer_types": ["full", "full", "shared", "shared"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
}


@pytest.fixture(params=CONFIGURATIONS)
def theirs(request) -> Any:
    """A model whose every weight, norms and biases too, is random."""
    config = transformers.GlmMoeDsaConfig(**(COMMON | CONFIGURATIONS[request.param]))
    config._attn_implementation = config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(len(request.param))
    model = transformers.GlmMoeDsaForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                tensor.copy_(1 + 0.2 * noise)
            elif tensor.dim() == 1:
                tensor.copy_(0.2 * noise)
            else:
                tensor.copy_(noise / math.sqrt(tensor.shape[-1]))
    for layer in model.model.layers:  # hard-coded there; files have one for all
        for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
            norm.variance_epsilon = config.rms_norm_eps
    return model


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    """By the names of a GGUF file; C order is ggml's order backwards."""
    state, config = model.state_dict(), model.config
    named = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for layer in range(config.num_hidden_layers):
        ours, prefix = f"blk.{layer}", f"model.layers.{layer}"
        for name, other in LAYER_NAMES.items():
            for kind in ("weight", "bias"):
                if f"{prefix}.{other}.{kind}" in state:
                    named[f"{ours}.{name}.{kind}"] = state[f"{prefix}.{other}.{kind}"]
        expanded = state[f"{prefix}.self_attn.kv_b_proj.weight"]
        by_head = expanded.view(config.num_attention_heads, -1, config.kv_lora_rank)
        key, value = by_head.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
        named[f"{ours}.attn_k_b.weight"] = key.transpose(1, 2)
        named[f"{ours}.attn_v_b.weight"] = value
        if config.mlp_layer_types[layer] == "sparse":
            gate, up = state[f"{prefix}.mlp.experts.gate_up_proj"].chunk(2, dim=1)
            named[f"{ours}.ffn_gate_exps.weight"] = gate
            named[f"{ours}.ffn_up_exps.weight"] = up
            named[f"{ours}.ffn_down_exps.weight"] = state[f"{prefix}.mlp.experts.down_proj"]
            bias = state[f"{prefix}.mlp.gate.e_score_correction_bias"]
            named[f"{ours}.exp_probs_b.bias"] = bias
    return named


def _keys(config: Any) -> dict[str, Any]:
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
        "attention.indexer.types": [kind == "full" for kind in config.indexer_types],
        "rope.dimension_count": config.qk_rope_head_dim,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
        "vocab_size": config.vocab_size,
    }


def _write(model: Any, path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "glm-dsa")
    for name, value in _keys(model.config).items():
        add_value(writer, f"glm-dsa.{name}", value)
    for name, tensor in _tensors(model).items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.numpy(), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_logits_are_those_of_transformers(theirs, local_model, tmp_path):
    ids = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0].numpy()
    path = _write(theirs, tmp_path / "glm.gguf")
    for chunk in (TOKENS, 6, 1):
        logits = local_model(path, GgmlKernels, chunk=chunk).logits(ids.tolist())
        assert np.abs(logits - expected).max() < 1e-4
        assert (logits.argmax(1) == expected.argmax(1)).all()
