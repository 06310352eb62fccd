"""Hy3: GQA with q/k norms, a sigmoid router with a bias, one shared expert, dense first layers.

Two dialects: `hy_v3` (llama.cpp) and `hy-v3`; the router's bias is `exp_probs_b`, with or without
`.bias`; shared/hy3_dialect.py makes a third one the first. A layer is dense where it has no router.
The MTP block is one more such layer.
"""

from infer.blocks.attention import GqaAttention, GqaShape, RopeTables
from infer.caches.kv_cache import KvShape
from infer.families.feed_forward import check_router, feed_forward
from infer.families.mtp import bind_mtp
from infer.families.parts import Parts
from infer.families.trunk import bind_trunk
from infer.model import Layer, Model, ModelShape
from infer.mtp import MtpBlock
from shared.errors import MalformedModel, UnsupportedModel
from shared.experts import trunk_layer_count
from shared.gguf_index import GgufIndex

ARCHITECTURES = ("hy_v3", "hy-v3")


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
    n_layers = trunk_layer_count(index)
    return ModelShape(
        n_layers=n_layers,
        width=index.arch_key("embedding_length", int),
        vocab_size=index.arch_optional("vocab_size", int, rows[0] if rows else 0),
        context_length=index.arch_key("context_length", int),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=index.arch_key("attention.layer_norm_rms_epsilon", float),
        cache=KvShape(n_layers, kv_heads, head_dim),
    )


def build(parts: Parts) -> Model:
    shape = read_shape(parts.index)
    check_router(parts)
    rope = _rope(parts, shape)
    layers = [_layer(parts, shape, rope, number) for number in range(shape.n_layers)]
    return bind_trunk(parts, shape, layers)


def build_mtp(parts: Parts) -> MtpBlock:
    if parts.mtp_indexer:
        raise UnsupportedModel("Hy3's MTP block has no indexer", "leave --mtp-indexer out")
    shape = read_shape(parts.index)
    layer = _layer(parts, shape, _rope(parts, shape), shape.n_layers)
    return bind_mtp(parts, shape, layer, KvShape(1, shape.kv_heads, shape.head_dim))


def _rope(parts: Parts, shape: ModelShape) -> RopeTables:
    return RopeTables.build(
        parts.context,
        parts.index.arch_optional("rope.dimension_count", int, shape.head_dim),
        parts.index.arch_key("rope.freq_base", float),
        parts.weights.device,
    )


def _layer(parts: Parts, shape: ModelShape, rope: RopeTables, number: int) -> Layer:
    prefix = f"blk.{number}"
    return Layer(
        parts.weights.vector(f"{prefix}.attn_norm.weight", shape.width),
        _attention(parts, shape, rope, prefix),
        parts.weights.vector(f"{prefix}.ffn_norm.weight", shape.width),
        feed_forward(parts, shape.width, number),
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
