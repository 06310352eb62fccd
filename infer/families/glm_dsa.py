"""GLM-5.2: latent attention, sparse by an indexer that only some layers own; sigmoid router.

Dialects: `glm-dsa` (llama.cpp) and `glm_moe_dsa`; the router's bias `exp_probs_b` with or without
`.bias`; the matrices that expand a latent as `attn_k_b` (transposed) and `attn_v_b`, or unsplit as
`attn_kv_b`. Indexer weights of a layer that reads another's selection are ignored. The MTP block
is one more layer; it reads every position, as llama.cpp's does, though it has indexer weights: they
are used where `Parts.mtp_indexer` says so.
"""

from infer.blocks.attention import RopeTables
from infer.blocks.indexer import IndexerWeights
from infer.blocks.mla import MlaAttention, MlaWeights
from infer.caches.latent_cache import LatentShape
from infer.families.feed_forward import check_router, feed_forward
from infer.families.glm_shape import GlmShape
from infer.families.latent_heads import key_matrices, value_matrices
from infer.families.mtp import bind_mtp
from infer.families.parts import Parts
from infer.families.trunk import bind_trunk
from infer.kernels.scratch import LatentBounds
from infer.model import Layer, Model, ModelShape
from infer.mtp import MtpBlock
from shared.gguf_index import GgufIndex

ARCHITECTURES = ("glm-dsa", "glm_moe_dsa")


def read_shape(index: GgufIndex) -> ModelShape:
    glm = GlmShape.from_gguf(index)
    mla = glm.mla
    embedding = index.tensors.get("token_embd.weight")
    return ModelShape(
        n_layers=glm.n_layers,
        width=index.arch_key("embedding_length", int),
        vocab_size=index.arch_optional("vocab_size", int, embedding.shape[1] if embedding else 0),
        context_length=index.arch_key("context_length", int),
        heads=mla.heads,
        kv_heads=1,
        head_dim=mla.nope + mla.rope,
        eps=mla.eps,
        cache=LatentShape(glm.n_layers, mla.kv_lora, mla.rope, glm.index_dim, glm.index_layers),
        latent=LatentBounds(
            heads=mla.heads,
            width=mla.kv_lora + mla.rope,
            head_columns=max(mla.nope, mla.kv_lora),
            index_heads=glm.index_heads,
            index_dim=glm.index_dim,
            top_k=glm.top_k,
        ),
    )


def build(parts: Parts) -> Model:
    shape, glm = read_shape(parts.index), GlmShape.from_gguf(parts.index)
    check_router(parts)
    rope = _rope(parts, glm)
    layers = [
        _layer(parts, shape.width, glm, rope, number, number in glm.index_layers)
        for number in range(shape.n_layers)
    ]
    return bind_trunk(parts, shape, layers)


def build_mtp(parts: Parts) -> MtpBlock:
    shape, glm = read_shape(parts.index), GlmShape.from_gguf(parts.index)
    rope, own_index = _rope(parts, glm), parts.mtp_indexer
    layer = _layer(parts, shape.width, glm, rope, shape.n_layers, own_index)
    index_layers = (0,) if own_index else ()
    cache = LatentShape(1, glm.mla.kv_lora, glm.mla.rope, glm.index_dim, index_layers)
    return bind_mtp(parts, shape, layer, cache)


def _rope(parts: Parts, glm: GlmShape) -> RopeTables:
    theta = parts.index.arch_key("rope.freq_base", float)
    return RopeTables.build(parts.context, glm.mla.rope, theta, parts.weights.device)


def _layer(
    parts: Parts, width: int, glm: GlmShape, rope: RopeTables, number: int, owns_index: bool
) -> Layer:
    """Block `number`; without an index it reads what the cache's `selected` names."""
    prefix = f"blk.{number}"
    indexer = (_indexer(parts, width, glm, prefix), glm.top_k) if owns_index else None
    return Layer(
        parts.weights.vector(f"{prefix}.attn_norm.weight", width),
        MlaAttention(parts.kernels, glm.mla, _attention(parts, width, glm, prefix), rope, indexer),
        parts.weights.vector(f"{prefix}.ffn_norm.weight", width),
        feed_forward(parts, width, number),
    )


def _attention(parts: Parts, width: int, glm: GlmShape, prefix: str) -> MlaWeights:
    weights, mla = parts.weights, glm.mla
    head_dim, kv_rows = mla.nope + mla.rope, mla.kv_lora + mla.rope
    return MlaWeights(
        q_a=weights.matrix(f"{prefix}.attn_q_a.weight", glm.q_lora, width),
        q_a_norm=weights.vector(f"{prefix}.attn_q_a_norm.weight", glm.q_lora),
        q_b=weights.matrix(f"{prefix}.attn_q_b.weight", mla.heads * head_dim, glm.q_lora),
        kv_a=weights.matrix(f"{prefix}.attn_kv_a_mqa.weight", kv_rows, width),
        kv_a_norm=weights.vector(f"{prefix}.attn_kv_a_norm.weight", mla.kv_lora),
        key=key_matrices(parts, prefix, mla),
        value=value_matrices(parts, prefix, mla),
        output=weights.matrix(f"{prefix}.attn_output.weight", width, mla.heads * mla.value_dim),
    )


def _indexer(parts: Parts, width: int, glm: GlmShape, prefix: str) -> IndexerWeights:
    weights, dim = parts.weights, glm.index_dim
    return IndexerWeights(
        q=weights.matrix(f"{prefix}.indexer.attn_q_b.weight", glm.index_heads * dim, glm.q_lora),
        key=weights.matrix(f"{prefix}.indexer.attn_k.weight", dim, width),
        head_weights=weights.matrix(f"{prefix}.indexer.proj.weight", glm.index_heads, width),
        norm_weight=weights.vector(f"{prefix}.indexer.k_norm.weight", dim),
        norm_bias=weights.vector(f"{prefix}.indexer.k_norm.bias", dim),
    )
