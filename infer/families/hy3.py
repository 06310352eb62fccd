"""Hy3: GQA with q/k norms, a sigmoid router with a bias, one shared expert, dense first layers.

Two dialects: `hy_v3` (llama.cpp) and `hy-v3`; the router's bias is `exp_probs_b`, with or without
`.bias`. A layer is dense where it has no router. MTP blocks behind the last layer are left out.
"""

from infer.blocks.attention import GqaAttention, GqaShape, RopeTables
from infer.blocks.ffn import DenseFfn
from infer.blocks.moe import MoeFfn, Routing
from infer.families.parts import Parts
from infer.kernels.interface import ExpertFormat
from infer.model import Layer, Model, ModelShape
from shared.errors import MalformedModel, UnsupportedModel
from shared.experts import trunk_layer_count
from shared.gguf_index import GgufIndex

ARCHITECTURES = ("hy_v3", "hy-v3")
GATING_SIGMOID = 2


def read_shape(index: GgufIndex) -> ModelShape:
    head_dim = index.arch_key("attention.key_length", int)
    heads, kv_heads = (index.arch_key(f"attention.head_count{kind}", int) for kind in ("", "_kv"))
    rotated = index.arch_optional("rope.dimension_count", int, head_dim)
    if (
        index.arch_optional("attention.value_length", int, head_dim) != head_dim
        or not 0 < kv_heads <= heads
        or heads % kv_heads
        or not 0 < rotated <= head_dim
        or rotated % 2
    ):
        raise MalformedModel(
            f"{index.paths[0]}: {heads} query heads, {kv_heads} key heads of {head_dim}, of which"
            f" {rotated} are rotated, do not go together",
            "convert or download the model again",
        )
    rows = (
        index.tensors["token_embd.weight"].shape[1:] if "token_embd.weight" in index.tensors else ()
    )
    return ModelShape(
        n_layers=trunk_layer_count(index),
        width=index.arch_key("embedding_length", int),
        vocab_size=index.arch_optional("vocab_size", int, rows[0] if rows else 0),
        context_length=index.arch_key("context_length", int),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=index.arch_key("attention.layer_norm_rms_epsilon", float),
    )


def build(parts: Parts) -> Model:
    index, weights = parts.index, parts.weights
    shape = read_shape(index)
    gating = index.arch_optional("expert_gating_func", int, GATING_SIGMOID)
    if gating != GATING_SIGMOID or not index.arch_optional("expert_weights_norm", bool, True):
        raise UnsupportedModel(
            f"{index.paths[0]}: gating function {gating} or unnormalised router weights",
            "Hy3 files have a normalised sigmoid router (expert_gating_func 2)",
        )
    rope = RopeTables.build(
        parts.context,
        index.arch_optional("rope.dimension_count", int, shape.head_dim),
        index.arch_key("rope.freq_base", float),
        weights.device,
    )
    layers = [_layer(parts, shape, rope, number) for number in range(shape.n_layers)]
    output = weights.first("output.weight", "token_embd.weight")
    return Model(
        parts.kernels,
        shape,
        weights.matrix("token_embd.weight", shape.vocab_size, shape.width),
        layers,
        weights.vector("output_norm.weight", shape.width),
        weights.matrix(output, shape.vocab_size, shape.width),
    )


def _layer(parts: Parts, shape: ModelShape, rope: RopeTables, number: int) -> Layer:
    prefix = f"blk.{number}"
    dense = f"{prefix}.ffn_gate_inp.weight" not in parts.weights
    return Layer(
        parts.weights.vector(f"{prefix}.attn_norm.weight", shape.width),
        _attention(parts, shape, rope, prefix),
        parts.weights.vector(f"{prefix}.ffn_norm.weight", shape.width),
        _dense(parts, shape, prefix) if dense else _moe(parts, shape, number),
    )


def _attention(parts: Parts, shape: ModelShape, rope: RopeTables, prefix: str) -> GqaAttention:
    weights, width, head_dim = parts.weights, shape.width, shape.head_dim
    heads = shape.heads
    q_rows, kv_rows = heads * head_dim, shape.kv_heads * head_dim
    return GqaAttention(
        parts.kernels,
        GqaShape(heads, shape.kv_heads, head_dim, shape.eps),
        (
            weights.matrix(f"{prefix}.attn_q.weight", q_rows, width),
            weights.matrix(f"{prefix}.attn_k.weight", kv_rows, width),
            weights.matrix(f"{prefix}.attn_v.weight", kv_rows, width),
        ),
        weights.matrix(f"{prefix}.attn_output.weight", width, q_rows),
        weights.vector(f"{prefix}.attn_q_norm.weight", head_dim),
        weights.vector(f"{prefix}.attn_k_norm.weight", head_dim),
        rope,
    )


def _dense(parts: Parts, shape: ModelShape, prefix: str) -> DenseFfn:
    return _gated(parts, shape, prefix, "", parts.index.arch_key("feed_forward_length", int))


def _gated(parts: Parts, shape: ModelShape, prefix: str, suffix: str, hidden: int) -> DenseFfn:
    weights, width = parts.weights, shape.width
    return DenseFfn(
        parts.kernels,
        weights.matrix(f"{prefix}.ffn_gate{suffix}.weight", hidden, width),
        weights.matrix(f"{prefix}.ffn_up{suffix}.weight", hidden, width),
        weights.matrix(f"{prefix}.ffn_down{suffix}.weight", width, hidden),
    )


def _moe(parts: Parts, shape: ModelShape, number: int) -> MoeFfn:
    index, weights, experts = parts.index, parts.weights, parts.experts
    prefix = f"blk.{number}"
    gate_name = f"{prefix}.ffn_gate_exps.weight"
    width, expert_width, _ = index.tensors[gate_name].shape
    if width != shape.width:
        raise MalformedModel(
            f"{index.paths[0]}: {gate_name} takes {width} inputs, the model is {shape.width} wide",
            "convert or download the model again",
        )
    shared_width = index.arch_optional("expert_shared_feed_forward_length", int, expert_width)
    bias = weights.first(f"{prefix}.exp_probs_b", f"{prefix}.exp_probs_b.bias")
    gate_type, up_type, down_type = experts.part_types[number].tolist()
    return MoeFfn(
        parts.kernels,
        parts.source,
        number,
        Routing(experts.top_k, index.arch_optional("expert_weights_scale", float, 1.0)),
        weights.matrix(f"{prefix}.ffn_gate_inp.weight", experts.n_experts, shape.width),
        weights.vector(bias, experts.n_experts),
        ExpertFormat(gate_type, up_type, down_type, shape.width, expert_width),
        _gated(parts, shape, prefix, "_shexp", shared_width),
    )
