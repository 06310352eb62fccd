"""GPU memory that one client takes besides its context: by the model's shape, --ctx and --chunk.

    client = [ KV cache: ctx tokens | activations: chunk tokens | fixed ]

The daemon leaves it free; the client keeps to it when it chooses its chunk.
"""

from shared.errors import ConfigError
from shared.experts import served_layer_count
from shared.gguf_index import GgufIndex
from shared.index_layers import index_layers

DEFAULT_CONTEXT = 4096
# Planned for where no --chunk is given: larger ones cost slots, smaller ones read more experts
# for each token of a prompt.
PLANNED_CHUNK = 2048
# Keys and values are 16-bit numbers, activations float32.
CACHE_VALUE_BYTES = 2
ACTIVATION_VALUE_BYTES = 4
# Whatever the chunk is: logits, scratch memory of kernels and of recorded graphs, code, and what
# torch's allocator holds between sizes. On an H200 it was 770 MiB, with prompts of 8,000 tokens.
FIXED_BYTES = 832 << 20
# Of those, what no allocator of ours gives: code that is loaded, recorded graphs.
OUTSIDE_BYTES = 128 << 20


def client_bytes(index: GgufIndex, context: int, chunk: int | None) -> int:
    """For `context` tokens (0: the default) and chunks of a prompt of `chunk` tokens."""
    tokens = planned_context(index, context)
    chunk_tokens = min(tokens, chunk or PLANNED_CHUNK)
    cache_bytes = CACHE_VALUE_BYTES * cache_token_values(index) * tokens
    return cache_bytes + chunk_tokens * _activation_bytes(index) + FIXED_BYTES


def planned_context(index: GgufIndex, context: int) -> int:
    longest = index.arch_optional("context_length", int, DEFAULT_CONTEXT)
    return context or min(DEFAULT_CONTEXT, longest)


def check_context(index: GgufIndex, context: int) -> None:
    """ConfigError for more tokens than the model has been made for, where it says how many."""
    longest = index.arch_optional("context_length", int, context)
    if context > longest:
        raise ConfigError(
            f"--ctx {context} is more than the model's context of {longest}",
            f"give {longest} or less",
        )


def cache_token_values(index: GgufIndex) -> int:
    """Numbers that all layers keep of a token.

    Grouped queries: a key and a value for each kv head. Latent attention: one latent and one
    rotated key, and in layers that own an index a key for it.
    """
    n_layers = served_layer_count(index)
    if not _is_latent(index):
        return 2 * n_layers * _kv_heads(index) * _head_dim(index)
    indexed = len(index_layers(index, n_layers))
    index_dim = index.arch_optional("attention.indexer.key_length", int, 0)
    return n_layers * _latent_width(index) + indexed * index_dim


def activation_bytes(
    width: int, top_k: int, heads: int, kv_heads: int, head_dim: int, latent_width: int = 0
) -> int:
    """What one token of a chunk takes while a layer is computed.

    The residual stream, its norms and sums; a row for each expert; queries, keys, values and what
    attention makes of them. latent_width: what latent attention keeps of a token, else 0.
    """
    values = (6 + top_k) * width + (3 * heads + 4 * kv_heads) * head_dim
    return ACTIVATION_VALUE_BYTES * (values + 3 * heads * latent_width)


def _activation_bytes(index: GgufIndex) -> int:
    return activation_bytes(
        _width(index),
        index.arch_key("expert_used_count", int),
        _heads(index),
        _kv_heads(index),
        _head_dim(index),
        _latent_width(index) if _is_latent(index) else 0,
    )


def _is_latent(index: GgufIndex) -> bool:
    return f"{index.architecture}.attention.kv_lora_rank" in index.metadata


def _latent_width(index: GgufIndex) -> int:
    rope = index.arch_key("rope.dimension_count", int)
    return index.arch_key("attention.kv_lora_rank", int) + rope


# Keys that a family of ours must have are optional here: the daemon serves experts of any family.


def _width(index: GgufIndex) -> int:
    return index.arch_optional("embedding_length", int, 0)


def _heads(index: GgufIndex) -> int:
    return index.arch_optional("attention.head_count", int, 1)


def _kv_heads(index: GgufIndex) -> int:
    return index.arch_optional("attention.head_count_kv", int, _heads(index))


def _head_dim(index: GgufIndex) -> int:
    """A head's own width; in files of latent attention key_length may be that of the cache."""
    whole = index.arch_optional("attention.key_length", int, _width(index) // max(1, _heads(index)))
    return index.arch_optional("attention.key_length_mla", int, whole)
