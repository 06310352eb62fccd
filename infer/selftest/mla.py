"""Latent attention: dense (`check_mla`), and reading what an indexer selects (`check_dsa`).

The reference expands every latent to keys and values of all heads; nothing is absorbed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from infer.blocks.attention import RopeTables
from infer.blocks.indexer import KEY_NORM_EPS, IndexerWeights
from infer.blocks.mla import MlaAttention, MlaShape, MlaWeights
from infer.caches.latent_cache import LatentShape
from infer.kernels import reference
from infer.kernels.interface import Kernels
from infer.selftest.outcome import EXACT_LIMIT, Outcome, largest_error
from infer.selftest.stage import CONTEXT, TOKENS, WIDTH, Stage, phases

_SHAPE = MlaShape(heads=8, nope=48, rope=32, kv_lora=128, value_dim=64, eps=1e-5)
_Q_LORA = 96
_INDEX_HEADS, _INDEX_DIM, _TOP_K = 8, 64, 40


def check_mla(kernels: Kernels, stage: Stage) -> Iterator[Outcome]:
    rope = RopeTables.build(CONTEXT, _SHAPE.rope, 10000.0, stage.device)
    weights, weights64 = _draw_attention(stage)
    attention = MlaAttention(kernels, _SHAPE, weights, rope)
    x = stage.inputs()
    expected = weights64.attend(x.double(), rope, _causal())
    kv = LatentShape(1, _SHAPE.kv_lora, _SHAPE.rope, 1, ()).allocate(CONTEXT, True, stage.device)
    for name, start, stop in phases():
        result = attention.forward(x[start:stop].to(stage.device), 0, kv, start, True)
        yield Outcome(name, largest_error(result, expected[start:stop]), EXACT_LIMIT)


def check_dsa(kernels: Kernels, stage: Stage) -> Iterator[Outcome]:
    """A layer with an index, and one behind it that reads the same positions.

    The selection is judged by the scores of what it chose, against the best there are; then
    attention by what it makes of that selection.
    """
    rope = RopeTables.build(CONTEXT, _SHAPE.rope, 10000.0, stage.device)
    (own, own64), (shared, shared64) = _draw_attention(stage), _draw_attention(stage)
    index, index64 = _draw_indexer(stage)
    layers = (
        MlaAttention(kernels, _SHAPE, own, rope, (index, _TOP_K)),
        MlaAttention(kernels, _SHAPE, shared, rope),
    )
    inputs = stage.inputs(), stage.inputs()
    scores = index64.scores(inputs[0].double(), own64.query_latents(inputs[0].double()), rope)
    shape = LatentShape(2, _SHAPE.kv_lora, _SHAPE.rope, _INDEX_DIM, (0,))
    kv = shape.allocate(CONTEXT, True, stage.device)
    for name, start, stop in phases():
        taken: dict[str, Tensor] = {}
        results = [
            layer.forward(
                x[start:stop].to(stage.device), number, kv, start, True, taken.__setitem__
            )
            for number, (layer, x) in enumerate(zip(layers, inputs, strict=True))
        ]
        read = _mask(taken["indexer_topk.0"].cpu(), start)
        error = _selection_error(scores[start:stop], read, start)
        yield Outcome(f"{name}: selection", error, EXACT_LIMIT)
        for what, weights64, x, result in zip(
            ("own index", "shared"), (own64, shared64), inputs, results, strict=True
        ):
            expected = weights64.attend(x[:stop].double(), rope, read)
            yield Outcome(f"{name}: {what}", largest_error(result, expected), EXACT_LIMIT)


@dataclass(frozen=True)
class _Attention64:
    """The weights of MlaWeights in float64, on the CPU; key and value [heads, rows, columns]."""

    q_a: Tensor
    q_a_norm: Tensor
    q_b: Tensor
    kv_a: Tensor
    kv_a_norm: Tensor
    key: Tensor
    value: Tensor
    output: Tensor

    def query_latents(self, x: Tensor) -> Tensor:
        return reference.rms_norm(x @ self.q_a.T, self.q_a_norm, _SHAPE.eps)

    def attend(self, x: Tensor, rope: RopeTables, read: Tensor) -> Tensor:
        """x [tokens, WIDTH] from position 0; read bool [rows, tokens] -> the last rows' results."""
        shape, count = _SHAPE, len(x)
        cos, sin = rope.cos.cpu().double(), rope.sin.cpu().double()
        q = (self.query_latents(x) @ self.q_b.T).view(count, shape.heads, -1)
        q = reference.rope_pairs(q, cos, sin, 0, shape.nope)[-len(read) :]
        latents, rotated = (x @ self.kv_a.T).split((shape.kv_lora, shape.rope), -1)
        latents = reference.rms_norm(latents, self.kv_a_norm, shape.eps)
        rotated = reference.rope_pairs(rotated[:, None], cos, sin, 0)
        keys = torch.einsum("tc,hcn->thn", latents, self.key)
        keys = torch.cat((keys, rotated.expand(-1, shape.heads, -1)), -1)
        values = torch.einsum("tc,hvc->thv", latents, self.value)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * (shape.nope + shape.rope) ** -0.5
        weights = scores.masked_fill(~read, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khv->qhv", weights, values)
        return mixed.reshape(len(read), -1) @ self.output.T


def _draw_attention(stage: Stage) -> tuple[MlaWeights, _Attention64]:
    shape = _SHAPE
    drawn = {
        "q_a": stage.matrix(_Q_LORA, WIDTH),
        "q_a_norm": stage.norm(_Q_LORA),
        "q_b": stage.matrix(shape.heads * (shape.nope + shape.rope), _Q_LORA),
        "kv_a": stage.matrix(shape.kv_lora + shape.rope, WIDTH),
        "kv_a_norm": stage.norm(shape.kv_lora),
        "output": stage.matrix(WIDTH, shape.heads * shape.value_dim),
    }
    for name, rows, columns in (
        ("key", shape.kv_lora, shape.nope),
        ("value", shape.value_dim, shape.kv_lora),
    ):
        whole, whole64 = stage.matrix(shape.heads * rows, columns)
        heads = [whole.part(head * rows, rows) for head in range(shape.heads)]
        drawn[name] = heads, whole64.view(shape.heads, rows, columns)
    there, here = ({name: pair[side] for name, pair in drawn.items()} for side in (0, 1))
    return MlaWeights(**there), _Attention64(**here)


@dataclass(frozen=True)
class _Indexer64:
    """The weights of IndexerWeights in float64, on the CPU."""

    q: Tensor
    key: Tensor
    head_weights: Tensor
    norm_weight: Tensor
    norm_bias: Tensor

    def scores(self, x: Tensor, q_latents: Tensor, rope: RopeTables) -> Tensor:
        """[TOKENS, TOKENS]"""
        cos, sin = rope.cos.cpu().double(), rope.sin.cpu().double()
        q = (q_latents @ self.q.T).view(len(x), _INDEX_HEADS, _INDEX_DIM)
        q = reference.rope_pairs(q, cos, sin, 0)
        keys = layer_norm(
            x @ self.key.T, (_INDEX_DIM,), self.norm_weight, self.norm_bias, KEY_NORM_EPS
        )
        keys = reference.rope_pairs(keys[:, None], cos, sin, 0)[:, 0]
        return reference.index_scores(q, x @ self.head_weights.T, keys)


def _draw_indexer(stage: Stage) -> tuple[IndexerWeights, _Indexer64]:
    drawn = {
        "q": stage.matrix(_INDEX_HEADS * _INDEX_DIM, _Q_LORA),
        "key": stage.matrix(_INDEX_DIM, WIDTH),
        "head_weights": stage.matrix(_INDEX_HEADS, WIDTH),
        "norm_weight": stage.norm(_INDEX_DIM),
        "norm_bias": stage.norm(_INDEX_DIM),
    }
    there, here = ({name: pair[side] for name, pair in drawn.items()} for side in (0, 1))
    return IndexerWeights(**there), _Indexer64(**here)


def _causal() -> Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def _mask(selected: Tensor, start: int) -> Tensor:
    """bool [rows, start + rows]: the positions that rows from `start` on read."""
    rows = len(selected)
    read = torch.zeros(rows, TOKENS, dtype=torch.bool).scatter_(1, selected.long(), True)
    return (read & _causal()[start : start + rows])[:, : start + rows]


def _selection_error(scores: Tensor, read: Tensor, start: int) -> float:
    """By how much the scores of what is read are worse than the best, relative to the largest.

    inf where a row reads more or fewer positions than it should.
    """
    worst = 0.0
    for row in range(len(read)):
        visible = scores[row, : start + row + 1]
        chosen = visible[read[row, : start + row + 1]]
        best = visible.topk(min(_TOP_K, len(visible))).values
        if len(chosen) != len(best):
            return float("inf")
        lost = (best - chosen.sort(descending=True).values).abs().max()
        worst = max(worst, float(lost / visible.abs().max()))
    return worst
