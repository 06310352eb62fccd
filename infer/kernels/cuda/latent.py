"""Latent attention and the choice of what it reads, in torch's operations.

Over a cache of 16-bit numbers both factors of a product are bfloat16, and sums are float32; over a
float32 cache all is float32. Nothing waits for the device. For one token `start` may be
an int32 tensor [1], read when the work runs: then all of the cache that is given is read, and what
lies behind the position is hidden. Memory is bounded by cutting queries
into blocks, and positions too where their scores have heads:

    attention   ATTENTION_BYTES for scores of heads x rows x positions read and for the keys that a
                selection gathers, and up to twice the scores for weights: with 2,048 positions of
                width 576 and 64 heads a row takes 0.5 MB of scores and 2.4 MB of keys (4.7 MB in
                float32), 23 rows at a time, at any context
    select      PRODUCT_BYTES for heads x rows x some positions, then rows x positions: at 131,072
                positions 64 rows at a time, 34 MB of scores and four times that for masks, counts
                and places. Heads x rows x all positions are never there.
"""

import torch
from torch import Tensor

ATTENTION_BYTES = 64 << 20
PRODUCT_BYTES = 16 << 20
SELECT_BYTES = 32 << 20
_FLOAT_BYTES = 4


def rope_pairs(x: Tensor, cos: Tensor, sin: Tensor, start: int | Tensor, first: int) -> None:
    """As `Kernels.rope_pairs`; `start` may be an int32 tensor [1] for one token, as below."""
    n, half = len(x), cos.shape[1]
    if isinstance(start, Tensor):
        c, s = cos.index_select(0, start)[:, None], sin.index_select(0, start)[:, None]
    else:
        c, s = cos[start : start + n, None, :], sin[start : start + n, None, :]
    pairs = x[..., first : first + 2 * half].unflatten(-1, (half, 2))
    even, odd = pairs.unbind(-1)
    pairs.copy_(torch.stack((even * c - odd * s, odd * c + even * s), -1))


def latent_attention(
    q: Tensor,
    latent: Tensor,
    value_width: int,
    start: int | Tensor,
    scale: float,
    selected: Tensor | None,
) -> Tensor:
    """As `Kernels.latent_attention`."""
    n, heads, _ = q.shape
    end = _end(start, n, latent)
    read = end if selected is None else min(selected.shape[1], end)
    key_bytes = 0 if selected is None else latent.shape[1] * latent.dtype.itemsize
    block = max(1, ATTENTION_BYTES // (read * (_FLOAT_BYTES * heads + key_bytes)))
    out = torch.empty((n, heads, value_width), device=q.device)
    for first in range(0, n, block):
        rows = slice(first, min(first + block, n))
        at = _positions(start, rows, q.device)
        if selected is None:
            seen = end - n + rows.stop
            positions = torch.arange(seen, device=q.device)[None]
            keys = latent[None, :seen]
        else:
            # What lies behind a row's own position is not stored yet; it is hidden below.
            positions = selected[rows, :read].long()
            keys = latent[positions.clamp_max(end - 1)]
        scores = _scores(q[rows], keys) * scale
        scores.masked_fill_((positions > at)[:, None, :], -torch.inf)
        weights = scores.softmax(-1)
        values = keys[..., :value_width]
        out[rows] = _scores(weights, values.transpose(1, 2))
    return out


def _scores(a: Tensor, b: Tensor) -> Tensor:
    """a [rows, heads, width], b [rows or 1, positions, width] -> float32 [rows, heads, positions].

    With one b for all rows it is one product of two matrices.
    """
    if len(b) == 1:
        rows, heads, width = a.shape
        return _product(a.reshape(1, rows * heads, width), b.transpose(1, 2)).view(rows, heads, -1)
    return _product(a, b.transpose(1, 2))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Of batches of matrices, in b's type, with sums in float32."""
    if b.dtype is torch.float32:
        return torch.bmm(a, b)
    return torch.bmm(a.to(torch.bfloat16), b.to(torch.bfloat16), out_dtype=torch.float32)


def _end(start: int | Tensor, n: int, cache: Tensor) -> int:
    """Positions that are read at the most: all of `cache` where only the device knows."""
    if isinstance(start, Tensor):
        assert n == 1
        return len(cache)
    return start + n


def _positions(start: int | Tensor, rows: slice, device: torch.device) -> Tensor:
    """Of some rows: [rows, 1]."""
    if isinstance(start, Tensor):
        return start[:, None]
    return torch.arange(start + rows.start, start + rows.stop, device=device)[:, None]


def select(q: Tensor, weights: Tensor, keys: Tensor, start: int | Tensor, top_k: int) -> Tensor:
    """As `Kernels.select`."""
    n = len(q)
    stored = _end(start, n, keys)
    end = max(stored, top_k)
    block = max(1, SELECT_BYTES // (_FLOAT_BYTES * end))
    out = torch.empty((n, top_k), dtype=torch.int32, device=q.device)
    for first in range(0, n, block):
        rows = slice(first, min(first + block, n))
        scores = torch.full((rows.stop - first, end), -torch.inf, device=q.device)
        _score(q[rows], weights[rows], keys[: stored - n + rows.stop], scores)
        at = _positions(start, rows, q.device)
        positions = torch.arange(end, device=q.device)[None]
        scores.masked_fill_((positions > at) | scores.isnan(), -torch.inf)
        out[rows] = _best(scores, top_k)
    return out


def _score(q: Tensor, weights: Tensor, keys: Tensor, scores: Tensor) -> None:
    """Fill scores [rows, >= positions] for keys [positions, width]."""
    rows, heads, width = q.shape
    flat = q.reshape(1, rows * heads, width)
    step = max(1, PRODUCT_BYTES // (_FLOAT_BYTES * rows * heads))
    for first in range(0, len(keys), step):
        part = keys[None, first : first + step].transpose(1, 2)
        products = _product(flat, part).relu_().view(rows, heads, -1)
        scores[:, first : first + step][:, : products.shape[2]] = torch.bmm(
            weights[:, None, :], products
        )[:, 0]


def _best(scores: Tensor, top_k: int) -> Tensor:
    """int32 [rows, top_k]: where the largest are, ties to the lower position, ascending.

    Two scans of a row instead of a stable sort, which would need several times the memory.
    """
    least = scores.topk(top_k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above = scores > least
    ties = scores == least
    wanted = top_k - above.sum(1, keepdim=True, dtype=torch.int32)
    chosen = above | (ties & (ties.cumsum(1, dtype=torch.int32) <= wanted))
    # Each chosen position goes to its place; the others to one behind the last.
    places = torch.where(chosen, chosen.cumsum(1, dtype=torch.int32) - 1, top_k)
    rows, end = scores.shape
    positions = torch.arange(end, dtype=torch.int32, device=scores.device).expand(rows, end)
    out = torch.zeros((rows, top_k + 1), dtype=torch.int32, device=scores.device)
    return out.scatter_(1, places.long(), positions)[:, :top_k]
