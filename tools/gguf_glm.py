"""GLM files with random weights: small ones for tests, of real widths for benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf_factory import TinyModel, TinyTensor, float_tensor, random_tensor, tokenizer_metadata


@dataclass(frozen=True)
class GlmSizes:
    """Knobs of `glm_model`. The first `dense_layers` layers are dense; `index_layers` has a truth
    value for each layer, whether it owns an index, or is None: the file does not say.

    `expert_types` are those of gate, up and down.
    """

    architecture: str = "glm-dsa"
    n_layers: int = 4
    dense_layers: int = 1
    index_layers: Sequence[bool] | None = (True, True, False, True)
    index_everywhere: bool = False  # weights of an index also where it is not used
    n_experts: int = 8
    top_k: int = 2
    width: int = 256
    expert_width: int = 256
    dense_width: int = 512
    heads: int = 4
    q_lora: int = 256
    kv_lora: int = 256
    nope: int = 64
    rope: int = 32
    value_dim: int = 64
    index_heads: int = 8
    index_dim: int = 64
    index_top_k: int = 8
    context: int = 1024
    vocab_count: int = 384
    expert_types: Sequence[int] = (Type.IQ2_XXS, Type.IQ2_XXS, Type.Q2_K)
    resident_type: int = Type.Q8_0
    bias_name: str = "exp_probs_b.bias"
    tokenizer: bool = True
    seed: int = 0

    @classmethod
    def real(cls) -> "GlmSizes":
        """GLM-5.2's widths; of its 154,880 tokens 32,768: the embedding is not what is measured."""
        return cls(
            n_experts=256,
            top_k=8,
            width=6144,
            expert_width=2048,
            dense_width=12288,
            heads=64,
            q_lora=2048,
            kv_lora=512,
            nope=192,
            rope=64,
            value_dim=256,
            index_heads=32,
            index_dim=128,
            index_top_k=2048,
            context=131072,
            vocab_count=32768,
        )


def glm_model(sizes: GlmSizes | None = None, **knobs: Any) -> TinyModel:
    """A valid random model; `knobs` change `sizes`."""
    sizes = replace(sizes or GlmSizes(), **knobs)
    rng = np.random.default_rng(sizes.seed)
    make = _Maker(rng, sizes.resident_type)
    tensors = {
        "token_embd.weight": make.matrix(sizes.width, sizes.vocab_count),
        "output_norm.weight": make.norm(sizes.width),
        "output.weight": make.matrix(sizes.width, sizes.vocab_count),
    }
    for layer in range(sizes.n_layers):
        block = glm_block(
            make, sizes, dense=layer < sizes.dense_layers, index=_has_index(sizes, layer)
        )
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    return TinyModel(sizes.architecture, _metadata(sizes), tensors)


def _has_index(sizes: GlmSizes, layer: int) -> bool:
    given = sizes.index_layers
    return sizes.index_everywhere or given is None or bool(given[layer])


class _Maker:
    def __init__(self, rng: np.random.Generator, resident_type: int) -> None:
        self._rng = rng
        self._type = resident_type

    def matrix(self, *axes: int, type_id: int | None = None) -> TinyTensor:
        kind = self._type if type_id is None else type_id
        return random_tensor(self._rng, axes, kind, std=axes[0] ** -0.5)

    def norm(self, count: int, mean: float = 1) -> TinyTensor:
        return float_tensor(self._rng.normal(mean, 0.1, count))


def glm_block(make: _Maker, sizes: GlmSizes, dense: bool, index: bool) -> dict[str, TinyTensor]:
    """One layer's tensors by their names behind `blk.N.`."""
    width, heads = sizes.width, sizes.heads
    block = {
        "attn_norm.weight": make.norm(width),
        "attn_q_a.weight": make.matrix(width, sizes.q_lora),
        "attn_q_a_norm.weight": make.norm(sizes.q_lora),
        "attn_q_b.weight": make.matrix(sizes.q_lora, heads * (sizes.nope + sizes.rope)),
        "attn_kv_a_mqa.weight": make.matrix(width, sizes.kv_lora + sizes.rope),
        "attn_kv_a_norm.weight": make.norm(sizes.kv_lora),
        "attn_k_b.weight": make.matrix(sizes.nope, sizes.kv_lora, heads),
        "attn_v_b.weight": make.matrix(sizes.kv_lora, sizes.value_dim, heads),
        "attn_output.weight": make.matrix(heads * sizes.value_dim, width),
        "ffn_norm.weight": make.norm(width),
    }
    if index:
        block |= {
            "indexer.attn_q_b.weight": make.matrix(
                sizes.q_lora, sizes.index_heads * sizes.index_dim
            ),
            "indexer.attn_k.weight": make.matrix(width, sizes.index_dim),
            "indexer.proj.weight": make.matrix(width, sizes.index_heads),
            "indexer.k_norm.weight": make.norm(sizes.index_dim),
            "indexer.k_norm.bias": make.norm(sizes.index_dim, mean=0),
        }
    if dense:
        return block | _gated(make, width, sizes.dense_width, "")
    narrow, experts = sizes.expert_width, sizes.n_experts
    gate, up, down = sizes.expert_types
    return (
        block
        | {
            "ffn_gate_inp.weight": make.matrix(width, experts, type_id=Type.F32),
            sizes.bias_name: make.norm(experts, mean=0),
            "ffn_gate_exps.weight": make.matrix(width, narrow, experts, type_id=gate),
            "ffn_up_exps.weight": make.matrix(width, narrow, experts, type_id=up),
            "ffn_down_exps.weight": make.matrix(narrow, width, experts, type_id=down),
        }
        | _gated(make, width, narrow, "_shexp")
    )


def _gated(make: _Maker, width: int, inner: int, suffix: str) -> dict[str, TinyTensor]:
    return {
        f"ffn_gate{suffix}.weight": make.matrix(width, inner),
        f"ffn_up{suffix}.weight": make.matrix(width, inner),
        f"ffn_down{suffix}.weight": make.matrix(inner, width),
    }


def _metadata(sizes: GlmSizes) -> dict[str, Any]:
    keys = {
        "block_count": sizes.n_layers,
        "context_length": sizes.context,
        "embedding_length": sizes.width,
        "feed_forward_length": sizes.dense_width,
        "leading_dense_block_count": sizes.dense_layers,
        "vocab_size": sizes.vocab_count,
        "attention.head_count": sizes.heads,
        "attention.head_count_kv": 1,
        "attention.key_length": sizes.kv_lora + sizes.rope,
        "attention.value_length": sizes.kv_lora,
        "attention.key_length_mla": sizes.nope + sizes.rope,
        "attention.value_length_mla": sizes.value_dim,
        "attention.q_lora_rank": sizes.q_lora,
        "attention.kv_lora_rank": sizes.kv_lora,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.indexer.head_count": sizes.index_heads,
        "attention.indexer.key_length": sizes.index_dim,
        "attention.indexer.top_k": sizes.index_top_k,
        "rope.dimension_count": sizes.rope,
        "rope.freq_base": 8e6,
        "expert_count": sizes.n_experts,
        "expert_used_count": sizes.top_k,
        "expert_feed_forward_length": sizes.expert_width,
        "expert_shared_count": 1,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
    }
    if sizes.index_layers is not None:
        keys["attention.indexer.types"] = [bool(owns) for owns in sizes.index_layers]
    metadata = {f"{sizes.architecture}.{name}": value for name, value in keys.items()}
    if sizes.tokenizer:
        metadata |= tokenizer_metadata(sizes.vocab_count) | {"tokenizer.ggml.pre": "glm4"}
    return metadata
