"""Hy3 files of the dialect of ds4's pull request 523, read as if they were llama.cpp's.

Their architecture is `hy_v3`, and they hold the one published model: no MTP block, no key for the
length of its context, of its tokenizer only the texts and the merges. What is called otherwise:

    deepseek4.X                      is  hy_v3.X
    hy.intermediate_size             is  hy_v3.feed_forward_length
    hy.moe_intermediate_size         is  hy_v3.expert_feed_forward_length
    hy.routed_scaling_factor         is  hy_v3.expert_weights_scale
    blk.N.attn_{q,k,v}_proj.weight   is  blk.N.attn_{q,k,v}.weight
    blk.N.attn_o_proj.weight         is  blk.N.attn_output.weight
    blk.N.exp_probs_b.bias           is  blk.N.exp_probs_b
"""

import re
from collections.abc import Mapping
from typing import Any

from shared.gguf_shard import TensorInfo
from shared.gguf_values import Metadata

_ARCHITECTURE = "hy_v3"
_DEEPSEEK = "deepseek4."
_KEYS = {
    "hy.intermediate_size": "feed_forward_length",
    "hy.moe_intermediate_size": "expert_feed_forward_length",
    "hy.routed_scaling_factor": "expert_weights_scale",
}
# Of the published model, which the dialect has no keys for; a file that says otherwise counts.
_PUBLISHED = {
    "context_length": 262144,
    "expert_gating_func": 2,  # sigmoid
    "expert_weights_norm": True,
}
_VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "hunyuan-dense",
}
_PUBLISHED_VOCAB_SIZE = 120832
_PUBLISHED_TOKENS = {"tokenizer.ggml.bos_token_id": 120000, "tokenizer.ggml.eos_token_id": 120025}
_BLOCK = re.compile(r"(blk\.[0-9]{1,9}\.)(.+)")
_NAMES = {
    "attn_q_proj.weight": "attn_q.weight",
    "attn_k_proj.weight": "attn_k.weight",
    "attn_v_proj.weight": "attn_v.weight",
    "attn_o_proj.weight": "attn_output.weight",
    "exp_probs_b.bias": "exp_probs_b",
}


def translate(
    architecture: str, metadata: Metadata, tensors: Mapping[str, TensorInfo]
) -> tuple[Metadata, dict[str, TensorInfo]]:
    """Keys and names as llama.cpp has them; files of other dialects come back as they are."""
    if (
        architecture != _ARCHITECTURE
        or f"{_ARCHITECTURE}.block_count" in metadata
        or f"{_DEEPSEEK}block_count" not in metadata
    ):
        return metadata, dict(tensors)
    entries = {f"{_ARCHITECTURE}.{key}": value for key, value in _PUBLISHED.items()}
    for key in metadata:
        if key in _KEYS:
            entries[f"{_ARCHITECTURE}.{_KEYS[key]}"] = metadata[key]
        elif key.startswith(_DEEPSEEK):
            entries[f"{_ARCHITECTURE}.{key.removeprefix(_DEEPSEEK)}"] = metadata[key]
    if "tokenizer.ggml.tokens" in metadata:
        entries |= _tokenizer(metadata, entries.get(f"{_ARCHITECTURE}.vocab_size"))
    renamed = {_name(name): tensor._replace(name=_name(name)) for name, tensor in tensors.items()}
    return metadata.extended(entries), renamed


def _tokenizer(metadata: Metadata, vocab_size: Any) -> dict[str, Any]:
    known = _VOCABULARY | (_PUBLISHED_TOKENS if vocab_size == _PUBLISHED_VOCAB_SIZE else {})
    return {key: value for key, value in known.items() if key not in metadata}


def _name(tensor: str) -> str:
    block = _BLOCK.fullmatch(tensor)
    return block[1] + _NAMES.get(block[2], block[2]) if block else tensor
