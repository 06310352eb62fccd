"""How many tokens of a prompt are computed at once, as memory allows.

Each expert that a chunk touches is read once for it, so larger chunks cost fewer reads.
"""

import torch

from infer.model import ModelShape
from shared import client_memory
from shared.free_memory import available_memory_bytes

# Smaller chunks read almost every expert and use each for a few tokens only.
MIN_CHUNK = 256
MAX_CHUNK = 8192
# Of what is free; the rest is for other clients, and for pages of caches yet to be filled.
MEMORY_DIVISOR = 8
MAX_ACTIVATION_BYTES = 1 << 30
# Logits of as many rows as fit are computed at once where all of them are wanted.
MAX_LOGITS_BYTES = 256 << 20


def activation_bytes(shape: ModelShape, top_k: int) -> int:
    """What one token of a chunk takes while a layer is computed, float32.

    The residual stream, its norms and sums; a row for each expert; queries, keys, values and what
    attention makes of them.
    """
    latent = shape.latent
    return client_memory.activation_bytes(
        shape.width,
        top_k,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        latent.width if latent is not None else 0,
    )


def chunk_within(token_bytes: int, client_bytes: int, cache_bytes: int, context: int) -> int:
    """The longest for which a client keeps to `client_bytes`; 0 if that cannot be."""
    left_bytes = client_bytes - cache_bytes - client_memory.FIXED_BYTES
    return min(context, MAX_CHUNK, max(0, left_bytes // token_bytes))


def choose_chunk(token_bytes: int, free_bytes: int, context: int) -> int:
    """token_bytes: of activations; free_bytes: of memory, of which they get a share."""
    budget_bytes = min(free_bytes // MEMORY_DIVISOR, MAX_ACTIVATION_BYTES)
    return min(context, max(MIN_CHUNK, min(MAX_CHUNK, budget_bytes // token_bytes)))


def logits_chunk(chunk: int, vocab_size: int) -> int:
    """How much of a chunk at once, where every token's logits are wanted."""
    return max(1, min(chunk, MAX_LOGITS_BYTES // (4 * vocab_size)))


def free_memory_bytes(device: torch.device) -> int:
    """Of the device that computes."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes)
    return available_memory_bytes()
