"""Grouped-query attention."""

from collections.abc import Iterator

from infer.blocks.attention import GqaAttention, GqaShape, RopeTables
from infer.caches.kv_cache import KvShape
from infer.kernels import reference
from infer.kernels.interface import Kernels
from infer.selftest.outcome import EXACT_LIMIT, Outcome, largest_error
from infer.selftest.stage import CONTEXT, TOKENS, WIDTH, Stage, phases

_HEADS, _KV_HEADS, _HEAD_DIM, _EPS = 8, 2, 64, 1e-5


def check_gqa(kernels: Kernels, stage: Stage) -> Iterator[Outcome]:
    q, q64 = stage.matrix(_HEADS * _HEAD_DIM, WIDTH)
    k, k64 = stage.matrix(_KV_HEADS * _HEAD_DIM, WIDTH)
    v, v64 = stage.matrix(_KV_HEADS * _HEAD_DIM, WIDTH)
    output, output64 = stage.matrix(WIDTH, _HEADS * _HEAD_DIM)
    (q_norm, q_norm64), (k_norm, k_norm64) = stage.norm(_HEAD_DIM), stage.norm(_HEAD_DIM)
    rope = RopeTables.build(CONTEXT, _HEAD_DIM, 10000.0, stage.device)
    shape = GqaShape(_HEADS, _KV_HEADS, _HEAD_DIM, _EPS)
    attention = GqaAttention(kernels, shape, (q, k, v), output, q_norm, k_norm, rope)
    x = stage.inputs()

    cos, sin = rope.cos.cpu().double(), rope.sin.cpu().double()
    queries, keys, values = (
        (x.double() @ weight.T).view(TOKENS, -1, _HEAD_DIM) for weight in (q64, k64, v64)
    )
    queries = reference.rope_neox(reference.rms_norm(queries, q_norm64, _EPS), cos, sin, 0)
    keys = reference.rope_neox(reference.rms_norm(keys, k_norm64, _EPS), cos, sin, 0)
    mixed = reference.attention(queries, keys, values, 0, _HEAD_DIM**-0.5)
    expected = mixed.reshape(TOKENS, -1) @ output64.T

    kv = KvShape(1, _KV_HEADS, _HEAD_DIM).allocate(CONTEXT, True, stage.device)
    for name, start, stop in phases():
        result = attention.forward(x[start:stop].to(stage.device), 0, kv, start, True)
        yield Outcome(name, largest_error(result, expected[start:stop]), EXACT_LIMIT)
