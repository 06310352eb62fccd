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


def attention(q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    n, heads, _ = q.shape
    end = start + n
    repeats = heads // keys.shape[1]
    k = keys[:end].to(q.dtype).repeat_interleave(repeats, 1)
    v = values[:end].to(q.dtype).repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    positions = torch.arange(end, device=q.device)
    hidden = positions[None, :] > positions[start:, None]
    probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probabilities, v)


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
