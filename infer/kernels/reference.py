"""The operations in plain torch: the oracle of every kernel.

Tensors may be float32 or float64, on any device; the result has the input's type. Shapes are those
of `infer.kernels.interface`, with weights as dense tensors.
"""

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as dequantize_blocks
from torch import Tensor
from torch.nn.functional import silu

from infer.kernels.quant_matrix import QuantMatrix


def dequantize(matrix: QuantMatrix) -> Tensor:
    """float32 [rows, columns] on the CPU, bit-equal to ggml's to_float."""
    dense = dequantize_blocks(matrix.blocks(), GGMLQuantizationType(matrix.type_id))
    return torch.from_numpy(np.array(dense, np.float32).reshape(matrix.rows, matrix.columns))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope_neox(x: Tensor, cos: Tensor, sin: Tensor, start: int) -> Tensor:
    """A rotated copy; `Kernels.rope` says what is rotated."""
    half = cos.shape[1]
    rows = slice(start, start + len(x))
    c, s = cos[rows, None, :], sin[rows, None, :]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * c - second * s, second * c + first * s, rest), -1)


def rope_pairs(x: Tensor, cos: Tensor, sin: Tensor, start: int, first: int = 0) -> Tensor:
    """A rotated copy; `Kernels.rope_pairs` says what is rotated."""
    half = cos.shape[1]
    rows = slice(start, start + len(x))
    c, s = cos[rows, None, :], sin[rows, None, :]
    rotated = x.clone()
    even = x[..., first : first + 2 * half : 2]
    odd = x[..., first + 1 : first + 2 * half : 2]
    rotated[..., first : first + 2 * half : 2] = even * c - odd * s
    rotated[..., first + 1 : first + 2 * half : 2] = odd * c + even * s
    return rotated


def attention(q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    n, heads, head_dim = q.shape
    end, kv_heads = start + n, keys.shape[1]
    grouped = q.view(n, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("qgrd,kgd->grqk", grouped, keys[:end].to(q.dtype)) * scale
    positions = torch.arange(end, device=q.device)
    hidden = positions[None, :] > positions[start:, None]
    probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    mixed = torch.einsum("grqk,kgd->qgrd", probabilities, values[:end].to(q.dtype))
    return mixed.reshape(q.shape)


def per_head(x: Tensor, weights: Tensor) -> Tensor:
    """weights [heads, rows, columns]"""
    return torch.einsum("nhc,hrc->nhr", x, weights).contiguous()


def latent_attention(
    q: Tensor,
    latent: Tensor,
    value_width: int,
    start: int,
    scale: float,
    selected: Tensor | None = None,
) -> Tensor:
    end = start + len(q)
    keys = latent[:end].to(q.dtype)
    scores = torch.einsum("qhd,kd->hqk", q, keys) * scale
    positions = torch.arange(end, device=q.device)
    hidden = positions[None, :] > positions[start:, None]
    if selected is not None:
        top_k = selected.shape[1]
        unselected = torch.ones(len(q), max(end, top_k), dtype=torch.bool, device=q.device)
        unselected.scatter_(1, selected.long(), False)
        hidden = hidden | unselected[:, :end]
    probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,kd->qhd", probabilities, keys[:, :value_width]).contiguous()


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """[n, positions]"""
    products = torch.einsum("qhd,kd->qhk", q, keys.to(q.dtype)).relu()
    return torch.einsum("qhk,qh->qk", products, weights)


def select(q: Tensor, weights: Tensor, keys: Tensor, start: int, top_k: int) -> Tensor:
    end = start + len(q)
    scores = index_scores(q, weights, keys[:end])
    positions = torch.arange(max(end, top_k), device=q.device)
    # Later positions come last, in their order.
    scores = torch.nn.functional.pad(scores, (0, len(positions) - end))
    scores.masked_fill_(positions[None, :] > positions[start:end, None], -torch.inf)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    return best.sort(dim=-1).values.to(torch.int32)


def route_sigmoid(
    logits: Tensor, bias: Tensor | None, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    p = logits.sigmoid()
    scores = p if bias is None else p + bias
    ids = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = p.gather(-1, ids)
    return ids.to(torch.int32), chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale


def weighted_sum(rows: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
    total = rows[:, 0] * weights[:, :1]
    for rank in range(1, rows.shape[1]):
        total = total + rows[:, rank] * weights[:, rank : rank + 1]
    return total if shared is None else total + shared
