"""Hy3 files of the dialect of ds4's pull request 523, read as if they were llama.cpp's.

Their architecture is `hy_v3`, but what others call `hy_v3.X` is `hy.X` or `deepseek4.X`, and

    blk.N.attn_{q,k,v}_proj.weight   is  blk.N.attn_{q,k,v}.weight
    blk.N.attn_o_proj.weight         is  blk.N.attn_output.weight
    blk.N.ffn_gate_exps_b.bias       is  blk.N.exp_probs_b

`deepseek4.X` may describe another model's attention and router: what the tensors' shapes tell is
taken from them, and of the keys only what no shape tells.
"""

import re
from collections.abc import Mapping
from typing import Any

from shared.gguf_shard import TensorInfo
from shared.gguf_values import Metadata

_ARCHITECTURES = ("hy_v3", "hy-v3")
_PREFIXES = ("hy.", "deepseek4.")  # the first that has a key counts
_BLOCK = re.compile(r"(blk\.[0-9]{1,9}\.)(.+)")
_NAMES = {
    "attn_q_proj.weight": "attn_q.weight",
    "attn_k_proj.weight": "attn_k.weight",
    "attn_v_proj.weight": "attn_v.weight",
    "attn_o_proj.weight": "attn_output.weight",
    "ffn_gate_exps_b.bias": "exp_probs_b",
}
# What no shape tells. The published model's values stand in where its dimensions are the file's.
_KEYS: dict[str, int | float] = {
    "context_length": 262144,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 11158840.0,
    "expert_used_count": 8,
    "expert_weights_scale": 2.826,
}
_PUBLISHED = {"embedding_length": 4096, "expert_count": 192, "attention.key_length": 128}


def translate(
    architecture: str, metadata: Metadata, tensors: Mapping[str, TensorInfo]
) -> tuple[Metadata, dict[str, TensorInfo]]:
    """Keys and names as llama.cpp has them; files of other dialects come back as they are."""
    if architecture not in _ARCHITECTURES:
        return metadata, dict(tensors)
    renamed = {name: tensor._replace(name=name) for name, tensor in _renamed(tensors)}
    if f"{architecture}.block_count" in metadata or not any(
        key.startswith(_PREFIXES) for key in metadata
    ):
        return metadata, renamed
    keys: dict[str, int | float] = {**_told_by_shapes(renamed)}
    published = _PUBLISHED.items() <= keys.items()
    for key, stand_in in _KEYS.items():
        value = _first(metadata, key, stand_in if published else None)
        if value is not None:
            keys[key] = type(stand_in)(value)
    return metadata.extended(
        {f"{architecture}.{key}": value for key, value in keys.items()}
    ), renamed


def _renamed(tensors: Mapping[str, TensorInfo]) -> list[tuple[str, TensorInfo]]:
    found = []
    for name, tensor in tensors.items():
        block = _BLOCK.fullmatch(name)
        ours = f"{block[1]}{_NAMES[block[2]]}" if block and block[2] in _NAMES else name
        found.append((name if ours in tensors else ours, tensor))
    return found


def _told_by_shapes(tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    """Keys without their prefix; a tensor that is missing leaves its keys out."""
    found: dict[str, int] = {}
    sources = {
        "token_embd.weight": ("embedding_length", "vocab_size"),
        "ffn_gate.weight": ("", "feed_forward_length"),
        "ffn_gate_exps.weight": ("", "expert_feed_forward_length", "expert_count"),
        "ffn_gate_shexp.weight": ("", "expert_shared_feed_forward_length"),
        "attn_q_norm.weight": ("attention.key_length",),
        "attn_q.weight": ("", "attention.head_count"),
        "attn_k.weight": ("", "attention.head_count_kv"),
    }
    blocks = mtp_blocks = 0
    for name, tensor in tensors.items():
        block = _BLOCK.fullmatch(name)
        if block:
            blocks = max(blocks, int(block[1].split(".")[1]) + 1)
            mtp_blocks += block[2] == "nextn.eh_proj.weight"
        keys = sources.get(block[2] if block else name, ())
        found |= {key: size for key, size in zip(keys, tensor.shape, strict=False) if key}
    head_dim = found.get("attention.key_length")
    if head_dim:  # until now the counts are of rows
        for key in ("attention.head_count", "attention.head_count_kv"):
            if key in found:
                found[key] //= head_dim
        found["attention.value_length"] = found["rope.dimension_count"] = head_dim
    return found | {"block_count": blocks, "nextn_predict_layers": mtp_blocks}


def _first(metadata: Mapping[str, Any], key: str, default: int | float | None) -> Any:
    values = (metadata.get(prefix + key) for prefix in _PREFIXES)
    numbers = (v for v in values if isinstance(v, int | float) and not isinstance(v, bool))
    return next(numbers, default)
