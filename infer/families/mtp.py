"""The MTP block by its tensor names, which the families share: `nextn.*` around one more layer."""

from infer.ahead.prompt_ahead import PromptAhead
from infer.caches.cache import CacheShape
from infer.families.parts import Parts
from infer.model import Layer, ModelShape
from infer.mtp import MtpBlock


def bind_mtp(parts: Parts, shape: ModelShape, layer: Layer, cache: CacheShape) -> MtpBlock:
    """The block behind the trunk; `layer` and its `cache` are made as the family makes others.

    The block may have an embedding, an output and a norm before it of its own; else they are the
    trunk's.
    """
    kernels, weights = parts.kernels, parts.weights
    width, vocab_size = shape.width, shape.vocab_size
    prefix = f"blk.{shape.n_layers}.nextn"
    embedding = weights.first(f"{prefix}.embed_tokens.weight", "token_embd.weight")
    head = weights.first(f"{prefix}.shared_head_head.weight", "output.weight", "token_embd.weight")
    head_norm = weights.first(f"{prefix}.shared_head_norm.weight", "output_norm.weight")
    return MtpBlock(
        kernels=kernels,
        eps=shape.eps,
        cache=cache,
        embedding=weights.matrix(embedding, vocab_size, width),
        token_norm=weights.vector(f"{prefix}.enorm.weight", width),
        hidden_norm=weights.vector(f"{prefix}.hnorm.weight", width),
        joint=kernels.group([weights.matrix(f"{prefix}.eh_proj.weight", width, 2 * width)]),
        layer=layer,
        head_norm=weights.vector(head_norm, width),
        head=kernels.group([weights.matrix(head, vocab_size, width)]),
        ahead=PromptAhead(parts.source, parts.experts.n_experts),
    )
