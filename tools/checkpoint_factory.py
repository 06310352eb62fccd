"""Small Hugging Face checkpoints with random weights, for tests: written by hand with numpy.

`hy3_checkpoint(folder)` and `glm_checkpoint(folder)` write config.json, a tokenizer and one
safetensors file, and return the weights: what they are in float32, by their names in the file.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf_factory import tokenizer_metadata

VOCAB = 384
WIDTH = 256

HY3_CONFIG = {
    "model_type": "hy_v3",
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "hidden_size": WIDTH,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "router_scaling_factor": 2.826,
    "rope_parameters": {"rope_type": "default", "rope_theta": 11158840.0},
    "eos_token_id": 1,
}
GLM_CONFIG = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 3,
    "hidden_size": WIDTH,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_attention_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 48,
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 8,
    "indexer_types": ["full", "shared", "full"],
    "first_k_dense_replace": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "eos_token_id": [1, 2, 3],
}


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]
) -> None:
    """(dtype, shape, bytes) by name."""
    header, position = {}, 0
    for name, (dtype, shape, raw) in tensors.items():
        end = position + len(raw)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    head = json.dumps(header).encode()
    data = b"".join(raw for _, _, raw in tensors.values())
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def bf16(values: np.ndarray) -> tuple[np.ndarray, bytes]:
    """What is left of float32 values in BF16 (cut, not rounded), and the bytes."""
    upper = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return (upper.astype(np.uint32) << 16).view(np.float32).reshape(values.shape), upper.tobytes()


def hy3_checkpoint(folder: Path, **changes: Any) -> dict[str, np.ndarray]:
    config = HY3_CONFIG | changes
    shapes = _ends(config)
    for layer in range(config["num_hidden_layers"] + config["num_nextn_predict_layers"]):
        block = f"model.layers.{layer}"
        shapes |= {
            f"{block}.self_attn.q_proj.weight": (256, WIDTH),
            f"{block}.self_attn.k_proj.weight": (128, WIDTH),
            f"{block}.self_attn.v_proj.weight": (128, WIDTH),
            f"{block}.self_attn.o_proj.weight": (WIDTH, 256),
            f"{block}.self_attn.q_norm.weight": (64,),
            f"{block}.self_attn.k_norm.weight": (64,),
            **_norms(block),
        }
        if layer == 0:
            shapes |= _gated(f"{block}.mlp", 512)
            continue
        shapes[f"{block}.mlp.router.gate.weight"] = (config["num_experts"], WIDTH)
        shapes[f"{block}.mlp.expert_bias"] = (config["num_experts"],)
        shapes |= _gated(f"{block}.mlp.shared_mlp", 256)
        for expert in range(config["num_experts"]):
            shapes |= _gated(f"{block}.mlp.experts.{expert}", 256)
        if layer >= config["num_hidden_layers"]:
            shapes |= {
                f"{block}.eh_proj.weight": (WIDTH, 2 * WIDTH),
                f"{block}.enorm.weight": (WIDTH,),
                f"{block}.hnorm.weight": (WIDTH,),
                f"{block}.final_layernorm.weight": (WIDTH,),
            }
    return _write(folder, config, shapes)


def glm_checkpoint(folder: Path, **changes: Any) -> dict[str, np.ndarray]:
    """Its experts are fused, as transformers has them in memory."""
    config = GLM_CONFIG | changes
    shapes = _ends(config)
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        attention = f"{block}.self_attn"
        shapes |= {
            f"{attention}.q_a_proj.weight": (128, WIDTH),
            f"{attention}.q_a_layernorm.weight": (128,),
            f"{attention}.q_b_proj.weight": (4 * 96, 128),
            f"{attention}.kv_a_proj_with_mqa.weight": (128 + 32, WIDTH),
            f"{attention}.kv_a_layernorm.weight": (128,),
            f"{attention}.kv_b_proj.weight": (4 * (64 + 48), 128),
            f"{attention}.o_proj.weight": (WIDTH, 4 * 48),
            **_norms(block),
        }
        if config["indexer_types"][layer] == "full":
            shapes |= {
                f"{attention}.indexer.wq_b.weight": (4 * 64, 128),
                f"{attention}.indexer.wk.weight": (64, WIDTH),
                f"{attention}.indexer.weights_proj.weight": (4, WIDTH),
                f"{attention}.indexer.k_norm.weight": (64,),
                f"{attention}.indexer.k_norm.bias": (64,),
            }
        if layer == 0:
            shapes |= _gated(f"{block}.mlp", 512)
            continue
        shapes |= {
            f"{block}.mlp.gate.weight": (4, WIDTH),
            f"{block}.mlp.gate.e_score_correction_bias": (4,),
            f"{block}.mlp.experts.gate_up_proj": (4, 2 * 256, WIDTH),
            f"{block}.mlp.experts.down_proj": (4, WIDTH, 256),
            **_gated(f"{block}.mlp.shared_experts", 256),
        }
    return _write(folder, config, shapes)


def write_tokenizer(folder: Path) -> dict[str, Any]:
    """tokenizer.json and its settings from `gguf_factory.tokenizer_metadata`, which is returned."""
    keys = tokenizer_metadata(VOCAB)
    entries = list(
        zip(keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"], strict=True)
    )
    vocabulary = {text: number for number, (text, kind) in enumerate(entries) if kind == 1}
    added = [
        {"id": number, "content": text, "special": True}
        for number, (text, kind) in enumerate(entries)
        if kind == 3
    ]
    merges = [merge.split(" ") for merge in keys["tokenizer.ggml.merges"]]
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    settings = {
        "bos_token": "<bos>",
        "eos_token": {"content": "<eos>"},
        "chat_template": keys["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return keys


def _ends(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    ends: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    return ends if config.get("tie_word_embeddings") else ends | {"lm_head.weight": (VOCAB, WIDTH)}


def _norms(block: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{block}.input_layernorm.weight": (WIDTH,),
        f"{block}.post_attention_layernorm.weight": (WIDTH,),
    }


def _gated(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, WIDTH),
        f"{prefix}.up_proj.weight": (inner, WIDTH),
        f"{prefix}.down_proj.weight": (WIDTH, inner),
    }


def _write(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    weights, stored = {}, {}
    for name, shape in shapes.items():
        values = rng.normal(1.0 if "norm" in name else 0.0, 0.05, shape)
        weights[name], raw = bf16(values)
        stored[name] = ("BF16", shape, raw)
    write_safetensors(folder / "model.safetensors", stored)
    return weights
