"""The families that can be converted: a checkpoint's config and tensors as GGUF's.

Keys and names are llama.cpp's for `hy_v3` and `glm-dsa`. MTP blocks follow the trunk's layers in
both; in a checkpoint they are `model.layers.N` from num_hidden_layers on.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hf_pieces import Piece, Pieces, Source, layer_kinds, require, rope_base

from shared.errors import MalformedModel, UnsupportedModel

GATING_SIGMOID = 2


@dataclass(frozen=True)
class Family:
    """`build(pieces, MTP blocks)` adds a model's tensors and gives its keys without the prefix."""

    architecture: str
    pre_tokenizer: str
    build: Callable[[Pieces, int], dict[str, Any]]


@dataclass(frozen=True)
class ConvertedModel:
    """`metadata` without the tokenizer's."""

    family: Family
    metadata: dict[str, Any]
    pieces: list[Piece]
    n_layers: int
    vocab_size: int


def convert_model(
    config: Mapping[str, Any], names: Collection[str] | None, with_mtp: bool
) -> ConvertedModel:
    """What a GGUF of this model holds. `names`: the checkpoint's tensors, if there is one.

    UnsupportedModel for another model_type or options that no family computes.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise UnsupportedModel(
            f"config.json: model_type {kind!r} cannot be converted",
            f"there are {', '.join(FAMILIES)}",
        )
    pieces = Pieces(config, names)
    n_layers = pieces.number("num_hidden_layers")
    mtp_count = pieces.number("num_nextn_predict_layers", default=0)
    first_mtp = f"model.layers.{n_layers}.eh_proj.weight"
    if not with_mtp or (names is not None and first_mtp not in names):
        mtp_count = 0
    keys = _common_keys(pieces, n_layers + mtp_count, mtp_count)
    keys |= family.build(pieces, mtp_count)
    metadata = {f"{family.architecture}.{key}": value for key, value in keys.items()}
    return ConvertedModel(family, metadata, pieces.found, n_layers, pieces.number("vocab_size"))


def mtp_tensors(names: Collection[str], n_layers: int) -> set[str]:
    """Names of the checkpoint's tensors that belong to blocks from `n_layers` on."""
    found = set()
    for name in names:
        words = name.split(".")
        if words[:2] == ["model", "layers"] and words[2].isdigit() and int(words[2]) >= n_layers:
            found.add(name)
    return found


def _common_keys(pieces: Pieces, blocks: int, mtp_count: int) -> dict[str, Any]:
    config = pieces.config
    require(config, hidden_act="silu", attention_bias=False, mlp_bias=False)
    keys = {
        "block_count": blocks,
        "context_length": pieces.number("max_position_embeddings"),
        "embedding_length": pieces.number("hidden_size"),
        "feed_forward_length": pieces.number("intermediate_size"),
        "attention.head_count": pieces.number("num_attention_heads"),
        "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps", 1e-5)),
        "vocab_size": pieces.number("vocab_size"),
        "expert_used_count": pieces.number("num_experts_per_tok"),
        "expert_feed_forward_length": pieces.number("moe_intermediate_size"),
        "expert_weights_norm": True,
        "expert_gating_func": GATING_SIGMOID,
    }
    return keys | ({"nextn_predict_layers": mtp_count} if mtp_count else {})


def _ends(pieces: Pieces) -> None:
    width, vocab = pieces.number("hidden_size"), pieces.number("vocab_size")
    pieces.add("token_embd.weight", (width, vocab), "model.embed_tokens.weight")
    pieces.add("output_norm.weight", (width,), "model.norm.weight")
    tied = pieces.config.get("tie_word_embeddings", False)
    if not tied or pieces.has("lm_head.weight"):
        pieces.add("output.weight", (width, vocab), "lm_head.weight")


def _norms(pieces: Pieces, block: str, layer: str, width: int) -> None:
    pieces.add(f"{block}.attn_norm.weight", (width,), f"{layer}.input_layernorm.weight")
    pieces.add(f"{block}.ffn_norm.weight", (width,), f"{layer}.post_attention_layernorm.weight")


def _hy3(pieces: Pieces, mtp_count: int) -> dict[str, Any]:
    config, number = pieces.config, pieces.number
    require(config, moe_router_use_sigmoid=True, route_norm=True, qk_norm=True)
    n_layers, width = number("num_hidden_layers"), number("hidden_size")
    heads, kv_heads = number("num_attention_heads"), number("num_key_value_heads")
    head_dim = number("head_dim", default=width // heads)
    expert_width = number("moe_intermediate_size")
    count = number("num_experts", "num_local_experts")
    shared = expert_width * number("num_shared_experts", default=1)
    sparse = layer_kinds(config, n_layers, dense_default=1) + [True] * mtp_count
    _ends(pieces)
    for place, has_experts in enumerate(sparse):
        block, layer = f"blk.{place}", f"model.layers.{place}"
        _norms(pieces, block, layer, width)
        for part, rows in {"q": heads, "k": kv_heads, "v": kv_heads}.items():
            source = f"{layer}.self_attn.{part}_proj.weight"
            pieces.add(f"{block}.attn_{part}.weight", (width, rows * head_dim), source)
        for part in ("q", "k"):
            source = f"{layer}.self_attn.{part}_norm.weight"
            pieces.add(f"{block}.attn_{part}_norm.weight", (head_dim,), source)
        source = f"{layer}.self_attn.o_proj.weight"
        pieces.add(f"{block}.attn_output.weight", (heads * head_dim, width), source)
        if has_experts:
            mlp = f"{layer}.mlp"
            gates = (f"{mlp}.gate.weight", f"{mlp}.router.gate.weight")
            pieces.add(f"{block}.ffn_gate_inp.weight", (width, count), *gates)
            biases = (f"{mlp}.e_score_correction_bias", f"{mlp}.expert_bias")
            pieces.add(f"{block}.exp_probs_b", (count,), *biases)
            pieces.experts(block, layer, width, expert_width, count, shared)
        else:
            pieces.dense(block, layer, width, number("intermediate_size"))
        if place >= n_layers:
            pieces.next_token_block(block, layer, width, number("vocab_size"))
    return {
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": rope_base(config, 11158840.0),
        "expert_count": count,
        "expert_shared_feed_forward_length": shared,
        "expert_weights_scale": float(config.get("router_scaling_factor", 1.0)),
    }


def _glm_dsa(pieces: Pieces, mtp_count: int) -> dict[str, Any]:
    config, number = pieces.config, pieces.number
    require(config, scoring_func="sigmoid", norm_topk_prob=True, n_group=1, topk_group=1)
    n_layers, width = number("num_hidden_layers"), number("hidden_size")
    count, expert_width = number("n_routed_experts"), number("moe_intermediate_size")
    shared_count = number("n_shared_experts", default=1)
    sparse = layer_kinds(config, n_layers, dense_default=3)
    dense_count = sparse.index(True) if True in sparse else n_layers
    if not all(sparse[dense_count:]):
        raise MalformedModel("config.json: dense layers behind sparse ones", "glm-dsa has none")
    own_index = _indexer_types(config, n_layers)
    _ends(pieces)
    for place in range(n_layers + mtp_count):
        block, layer = f"blk.{place}", f"model.layers.{place}"
        _norms(pieces, block, layer, width)
        _latent_attention(pieces, block, f"{layer}.self_attn")
        if place < n_layers:
            indexed = own_index[place]
        else:
            indexed = pieces.has(f"{layer}.self_attn.indexer.wk.weight")
        if indexed:
            _indexer(pieces, block, f"{layer}.self_attn.indexer")
        if place < dense_count:
            pieces.dense(block, layer, width, number("intermediate_size"))
        else:
            gate = f"{layer}.mlp.gate"
            pieces.add(f"{block}.ffn_gate_inp.weight", (width, count), f"{gate}.weight")
            bias = f"{gate}.e_score_correction_bias"
            pieces.add(f"{block}.exp_probs_b.bias", (count,), bias)
            pieces.experts(block, layer, width, expert_width, count, expert_width * shared_count)
        if place >= n_layers:
            pieces.next_token_block(block, layer, width, number("vocab_size"))
    rope = number("qk_rope_head_dim")
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": number("q_lora_rank"),
        "attention.kv_lora_rank": number("kv_lora_rank"),
        "attention.key_length": number("kv_lora_rank") + rope,
        "attention.value_length": number("kv_lora_rank"),
        "attention.key_length_mla": number("qk_nope_head_dim") + rope,
        "attention.value_length_mla": number("v_head_dim"),
        "attention.indexer.head_count": number("index_n_heads"),
        "attention.indexer.key_length": number("index_head_dim"),
        "attention.indexer.top_k": number("index_topk"),
        "attention.indexer.types": own_index,
        "rope.dimension_count": rope,
        "rope.freq_base": rope_base(config),
        "leading_dense_block_count": dense_count,
        "expert_count": count,
        "expert_shared_count": shared_count,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_weights_scale": float(config.get("routed_scaling_factor", 1.0)),
    }


def _latent_attention(pieces: Pieces, block: str, attention: str) -> None:
    """kv_b's rows are, head by head, [nope | v]; k_b is each head's first part transposed."""
    number = pieces.number
    width, heads = number("hidden_size"), number("num_attention_heads")
    q_rank, kv_rank = number("q_lora_rank"), number("kv_lora_rank")
    nope, rope, value = (number(f"{key}_head_dim") for key in ("qk_nope", "qk_rope", "v"))
    plain = {
        "attn_q_a": ((width, q_rank), "q_a_proj"),
        "attn_q_a_norm": ((q_rank,), "q_a_layernorm"),
        "attn_q_b": ((q_rank, heads * (nope + rope)), "q_b_proj"),
        "attn_kv_a_mqa": ((width, kv_rank + rope), "kv_a_proj_with_mqa"),
        "attn_kv_a_norm": ((kv_rank,), "kv_a_layernorm"),
        "attn_output": ((heads * value, width), "o_proj"),
    }
    for name, (shape, source) in plain.items():
        pieces.add(f"{block}.{name}.weight", shape, f"{attention}.{source}.weight")
    kv_b, step = f"{attention}.kv_b_proj.weight", nope + value
    keys = [Source(kv_b, step * head) for head in range(heads)]
    values = [Source(kv_b, step * head + nope) for head in range(heads)]
    pieces.add_stack(f"{block}.attn_k_b.weight", (nope, kv_rank, heads), keys, transposed=True)
    pieces.add_stack(f"{block}.attn_v_b.weight", (kv_rank, value, heads), values)


def _indexer(pieces: Pieces, block: str, indexer: str) -> None:
    number = pieces.number
    width, rank = number("hidden_size"), number("q_lora_rank")
    heads, key = number("index_n_heads"), number("index_head_dim")
    for name, shape, source in (
        ("attn_q_b.weight", (rank, heads * key), "wq_b.weight"),
        ("attn_k.weight", (width, key), "wk.weight"),
        ("proj.weight", (width, heads), "weights_proj.weight"),
        ("k_norm.weight", (key,), "k_norm.weight"),
        ("k_norm.bias", (key,), "k_norm.bias"),
    ):
        pieces.add(f"{block}.indexer.{name}", shape, f"{indexer}.{source}")


def _indexer_types(config: Mapping[str, Any], n_layers: int) -> list[bool]:
    """Whether each layer owns an index: a list, a pattern such as FFSS, or a schedule."""
    types = config.get("indexer_types") or config.get("index_topk_pattern")
    if types is None:
        frequency = max(config.get("index_topk_freq", 1), 1)
        offset = config.get("index_skip_topk_offset", 2)
        return [max(layer - offset + 1, 0) % frequency == 0 for layer in range(n_layers)]
    if len(types) != n_layers or not set(types) <= {"full", "shared", "F", "S"} or types[0] in "S":
        raise MalformedModel("config.json: indexer_types is no list of full and shared", "check it")
    return [kind in ("full", "F") for kind in types]


FAMILIES = {
    "hy_v3": Family("hy_v3", "hunyuan-dense", _hy3),
    "glm_moe_dsa": Family("glm-dsa", "glm4", _glm_dsa),
}
